"""What Megatron can't build or run is refused at configuration: what was asked, why not, what to do instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.config import ModelConfig
from engines.configuring import check_capabilities, validate
from engines.errors import CapabilityError, ConfigError, EnginesError, ModelError
from engines_megatron.config import MegatronConfig
from support.commands import recipe, snapshot, write_jsonl

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
MIXTURE: dict[str, Any] = {
    **SIZES,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
DENSE = {"model_type": "llama", **SIZES}
SMOLLM2 = {**DENSE, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
MIXTRAL = {"model_type": "mixtral", **MIXTURE}
QWEN3_MOE = {"model_type": "qwen3_moe", **MIXTURE}
QWEN2 = {"model_type": "qwen2", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def refused(folder: Path, config: dict[str, Any], settings: dict[str, Any], world_size: int) -> EnginesError | None:
    """What `check` raises for a folder with this config.json, as the doors of core call it."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        built = validate(MegatronConfig, settings, where="engine")
        built.check(ModelConfig(path=str(folder)), model_type="language_model", world_size=world_size)
    except EnginesError as error:
        return error
    return None


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, list[str]]] = {
    "heads": (
        SMOLLM2, {"tensor_parallel_size": 2}, 2,
        ["engine.tensor_parallel_size: 2 doesn't divide the model's 9 attention heads and 3 key-value heads.",
         "Sizes that work: 1, 3."],
    ),
    "key-value heads alone": (
        DENSE, {"tensor_parallel_size": 6}, 6, ["6 doesn't divide the model's 4 key-value heads.", "work: 1, 2, 4."],
    ),
    "rows of a dense MLP": (
        {**DENSE, "intermediate_size": 190}, {"tensor_parallel_size": 4}, 4,
        ["4 doesn't divide the model's 190 rows of an MLP (intermediate_size).", "work: 1, 2."],
    ),
    "rows of an MLP beside mixtures": (
        {**QWEN3_MOE, "intermediate_size": 191, "mlp_only_layers": [0]},
        {"tensor_parallel_size": 2, "sequence_parallel": True}, 2,
        ["2 doesn't divide the model's 191 rows"],
    ),
    "sequence parallelism of one rank": (
        DENSE, {"sequence_parallel": True}, 1,
        ["engine.sequence_parallel: true", "there is one", "Use false, or a tensor_parallel_size above 1."],
    ),
    "mixture without sequence parallelism": (
        MIXTRAL, {"tensor_parallel_size": 2}, 2,
        ["engine.sequence_parallel: false", "Megatron trains mixtures of experts only with", "Use true"],
    ),
    "experts": (
        MIXTRAL, {"expert_parallel_size": 4}, 4,
        ["engine.expert_parallel_size: 4 doesn't divide the model's 6 experts.", "work: 1, 2, 3, 6."],
    ),
    "rows of an expert": (
        QWEN3_MOE, {"expert_tensor_parallel_size": 3}, 3,
        ["engine.expert_tensor_parallel_size: 3 doesn't divide the model's 40 rows of an expert.", "1, 2, 4, 5, 8"],
    ),
    "no experts to share": (
        DENSE, {"expert_parallel_size": 2, "expert_tensor_parallel_size": 2}, 4,
        ["engine.expert_parallel_size: 2 is about experts, and this llama model has none. Use 1.",
         "engine.expert_tensor_parallel_size: 2 is about"],
    ),
    "no router to balance": (
        DENSE, {"moe_aux_loss_coefficient": 0.1}, 1,
        ["engine.moe_aux_loss_coefficient: 0.1 is about experts", "Use 0.0."],
    ),
    "mixture without mixtures": (
        {**QWEN3_MOE, "decoder_sparse_step": 9}, {"expert_parallel_size": 2}, 2, ["this qwen3_moe model has none"],
    ),
    "world": (
        DENSE, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 3}, 8,
        ["8 processes can't be divided into groups of 12 (tensor_parallel_size=2 * context_parallel_size=3 * "
         "pipeline_parallel_size=2). Start a multiple of 12 (launch.nproc)."],
    ),
    "world of experts": (
        MIXTRAL, {"expert_parallel_size": 3, "expert_tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8,
        ["groups of 12 (expert_tensor_parallel_size=2 * expert_parallel_size=3 * pipeline_parallel_size=2)"],
    ),
    "worlds of both": (
        MIXTRAL,
        {"tensor_parallel_size": 4, "sequence_parallel": True, "expert_parallel_size": 6}, 2,
        ["groups of 4 (", "groups of 6 (", "Start a multiple of 12 ("],
    ),
    "interleaving of one stage": (
        DENSE, {"virtual_pipeline_parallel_size": 2}, 1,
        ["engine.virtual_pipeline_parallel_size: 2 chunks", "there is one stage", "Use 1, or a pipeline"],
    ),
    "more stages than layers": (
        DENSE, {"pipeline_parallel_size": 5}, 5,
        ["engine.pipeline_parallel_size: 5 stages need 5 decoder layers at least, and the model has 4. Use fewer."],
    ),
    "more chunks than layers": (
        DENSE, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 3}, 2,
        ["2 stages of 3 chunks each need 6 decoder layers at least, and the model has 4", "fewer chunks"],
    ),
    "numbers for other chunks": (
        DENSE, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2, "pipeline_layers": [3, 1]}, 2,
        ["engine.pipeline_layers: [3, 1] has 2 numbers, and 2 stages of 2 chunks each are 4 chunks."],
    ),
    "numbers of other layers": (
        DENSE, {"pipeline_parallel_size": 2, "pipeline_layers": [3, 2]}, 2,
        ["engine.pipeline_layers: [3, 2] adds up to 5 decoder layers, and the model has 4."],
    ),
    "a chunk without layers": (
        DENSE, {"pipeline_parallel_size": 2, "pipeline_layers": [4, 0]}, 2,
        ["engine.pipeline_layers.1", "greater than or equal to 1"],
    ),
    "recompute nothing": (
        DENSE, {"recompute": "selective"}, 1,
        ["engine: recompute: selective", "activation_checkpointing", "set it to true"],
    ),
    "recompute what": (
        DENSE, {"recompute": "selectiv"}, 1, ["engine.recompute", 'Did you mean "selective"?'],
    ),
    "all faults at once": (
        SMOLLM2,
        {"tensor_parallel_size": 2, "expert_parallel_size": 2, "pipeline_parallel_size": 5,
         "pipeline_layers": [1, 1]}, 3,
        ["tensor_parallel_size: 2", "expert_parallel_size: 2", "5 stages", "2 numbers", "up to 2", "3 processes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path) -> None:
    config, settings, world_size, words = LAYOUTS[name]
    error = refused(tmp_path, config, settings, world_size)
    assert type(error) is ConfigError
    for word in words:
        assert word in str(error)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another family": (
        {**DENSE, "model_type": "gemma2"},
        ["model_type 'gemma2'", "llama, qwen2, qwen3, qwen3_moe, mixtral", "engine.strategy=fsdp2"],
    ),
    "no family": (without(DENSE, "model_type"), ["model_type None"]),
    "activation": ({**DENSE, "hidden_act": "gelu"}, ["hidden_act: 'gelu': silu alone", "fsdp2"]),
    "dropout": ({**QWEN3, "attention_dropout": 0.1}, ["attention_dropout: 0.1", "use 0"]),
    "biases of attention": ({**DENSE, "attention_bias": True}, ["attention_bias: True", "output projection"]),
    "biases of qwen3": ({**QWEN3, "attention_bias": True}, ["attention_bias: True"]),
    "biases of an MLP": ({**DENSE, "mlp_bias": True}, ["mlp_bias: True"]),
    "noise": ({**MIXTRAL, "router_jitter_noise": 0.01}, ["router_jitter_noise: 0.01"]),
    "quantized": ({**DENSE, "quantization_config": {"bits": 4}}, ["quantization_config", "unquantized model"]),
    "shared experts": ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, ["shared experts are not built"]),
    "one scaled expert": ({**MIXTRAL, "num_experts_per_tok": 1}, ["num_experts_per_tok: 1", "Megatron refuses it"]),
    "window": ({**MIXTRAL, "sliding_window": 128}, ["sliding_window: 128", "whole sequences alone"]),
    "window of qwen2": (
        {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        ["sliding_window: 64 with use_sliding_window"],
    ),
    "window by default": (
        {**QWEN3, "use_sliding_window": True, "max_window_layers": 0}, ["sliding_window: 4096 with use_"],
    ),
    "window in every layer": (
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
        ["sliding_window: 64"],
    ),
    "windows by layer": (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"] * 2}, ["layer_types: sliding_attention"],
    ),
    "rope, old": (
        {**DENSE, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        ["rope_scaling.rope_type: 'dynamic'", "default, linear, llama3, yarn alone"],
    ),
    "rope, new": (
        {**DENSE, "rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters.rope_type: 'longrope'"],
    ),
    "rope by layer": (
        {**QWEN3, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["differs by layer (full_attent"],
    ),
    "rope of half heads": ({**DENSE, "partial_rotary_factor": 0.5}, ["partial_rotary_factor: 0.5"]),
    "rope without factor": (
        {**DENSE, "rope_parameters": without(LLAMA3_ROPE, "factor", "low_freq_factor")},
        ["rope_parameters.factor: None: rope_type llama3 needs", "rope_parameters.low_freq_factor"],
    ),
    "rope not an object": ({**DENSE, "rope_scaling": "linear"}, ["rope_scaling: 'linear': must be an object"]),
    "keys missing": (
        without(DENSE, "num_hidden_layers", "rms_norm_eps"),
        ["num_hidden_layers is missing", "rms_norm_eps is missing", "save_pretrained"],
    ),
    "key-value heads missing": (without(QWEN2, "num_key_value_heads"), ["num_key_value_heads is missing"]),
    "size of a head missing": (without(QWEN3, "head_dim"), ["head_dim is missing"]),
    "experts missing": (
        without(QWEN3_MOE, "num_local_experts", "moe_intermediate_size"),
        ["num_local_experts is missing", "moe_intermediate_size is missing"],
    ),
    "a word": ({**DENSE, "hidden_size": "big"}, ["hidden_size", "valid integer", "'big'"]),
    "a truth": ({**DENSE, "num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    "nothing": ({**DENSE, "vocab_size": 0}, ["vocab_size", "greater than or equal to 1, got 0"]),
    "uneven groups": ({**DENSE, "num_key_value_heads": 5}, ["num_key_value_heads: 5 doesn't divide"]),
    "uneven heads": ({**without(DENSE, "head_dim"), "hidden_size": 100}, ["12 doesn't divide hidden_size: 100"]),
    "odd heads": ({**DENSE, "head_dim": 7}, ["head_dim: 7 is odd"]),
    "more experts of a token": ({**MIXTRAL, "num_experts_per_tok": 7}, ["7 is more than the 6 experts"]),
    "a token that isn't there": ({**DENSE, "pad_token_id": 10**9}, ["pad_token_id: 1000000000 is none of the"]),
    "all faults at once": (
        {**without(DENSE, "vocab_size"), "hidden_act": "relu", "mlp_bias": True, "rope_scaling": {"type": "su"}},
        ["vocab_size is missing", "hidden_act: 'relu'", "mlp_bias", "'su'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    config, words = MODELS[name]
    error = refused(tmp_path, config, {}, 1)
    assert type(error) is ModelError
    assert str(error).startswith(f"{tmp_path / 'config.json'}: ")
    for word in words:
        assert word in str(error)


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "everything at once": (
        MIXTRAL,
        {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2,
         "virtual_pipeline_parallel_size": 2, "context_parallel_size": 3, "expert_parallel_size": 6,
         "moe_aux_loss_coefficient": 0.1, "distributed_optimizer": True, "activation_checkpointing": True,
         "recompute": "selective"}, 24,
    ),
    "TP=3 of 9 and 3 heads": (SMOLLM2, {"tensor_parallel_size": 3}, 3),
    "a vocabulary that TP doesn't divide": ({**DENSE, "vocab_size": 251}, {"tensor_parallel_size": 4}, 4),
    "rows of dense layers that aren't there": (
        {**QWEN3_MOE, "intermediate_size": 191}, {"tensor_parallel_size": 2, "sequence_parallel": True}, 2,
    ),
    "experts over ranks that share no tensors": (QWEN3_MOE, {"expert_tensor_parallel_size": 2}, 2),
    "distributed optimizer of one rank": (DENSE, {"distributed_optimizer": True}, 1),
    "what recompute is by default": (DENSE, {"recompute": "full"}, 1),
    "one chunk, said": (DENSE, {"pipeline_layers": [4]}, 1),
    "a window that is off": ({**QWEN2, "use_sliding_window": False, "sliding_window": 64}, {}, 1),
    "a window beyond the layers": (
        {**QWEN2, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}, {}, 1,
    ),
    "a window that llama doesn't have": ({**DENSE, "sliding_window": 64}, {}, 1),
    "biases that qwen2 has anyway": ({**QWEN2, "attention_bias": True}, {}, 1),
    "one expert, not scaled": ({**QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": False}, {}, 1),
    "llama without groups": (without(DENSE, "num_key_value_heads", "head_dim"), {}, 1),
    "experts by their old name": (
        {**without(QWEN3_MOE, "num_local_experts"), "num_experts": 6}, {"expert_parallel_size": 6}, 6,
    ),
    "rope, new": ({**DENSE, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e4}}, {}, 1),
    "rope, old": ({**DENSE, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2}}, {}, 1),
    "rope, older": ({**DENSE, "rope_scaling": None}, {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_not_refused(name: str, tmp_path: Path) -> None:
    assert refused(tmp_path, *ACCEPTED[name]) is None


def test_own_settings_need_capabilities() -> None:
    config = MegatronConfig(
        distributed_optimizer=True, pipeline_layers=(1,), activation_checkpointing=True, recompute="selective"
    )
    with pytest.raises(CapabilityError) as error:
        check_capabilities(
            config, ModelConfig(path="x"), engine="less", capabilities=frozenset(), others=lambda capability: []
        )
    for fault in (
        "engine.distributed_optimizer: True needs the capability distributed_optimizer, which less",
        "engine.pipeline_layers: (1,) needs the capability pipeline_parallel, which less",
        "engine.recompute: 'selective' needs the capability activation_checkpointing, which less",
    ):
        assert fault in str(error.value)


def test_the_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOLLM2))
    save_file({}, tmp_path / "model" / "model.safetensors")
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3]}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    file = recipe(tmp_path, engine={"strategy": "megatron", "tensor_parallel_size": 2}, launch={"nproc": 2})
    before = snapshot(tmp_path)
    script = (
        "import sys; from engines.cli.main import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'transformers', 'megatron') if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert "9 attention heads and 3 key-value heads. Sizes that work: 1, 3." in done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(tmp_path) == before
