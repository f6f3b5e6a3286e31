"""Weights in and out, against transformers' own `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.errors import ModelError
from engines.models import PackedCausalLM, build_causal_lm, export_plan, load_plan
from engines.models.buffers import rebuild_buffers
from engines.testing.tiny import FAMILIES, REFERENCE_FAMILIES, tiny_folder, tiny_model
from engines.weights import PretrainedFolder

CHOSEN = (*REFERENCE_FAMILIES, "llama_scaled", "mixtral", "gpt2", "gemma3_text")


def families() -> list[Any]:
    names = dict.fromkeys((*CHOSEN, *FAMILIES))
    return [pytest.param(name, marks=[] if name in CHOSEN else [pytest.mark.more]) for name in names]


def filled(folder: Path) -> PackedCausalLM:
    model = build_causal_lm(folder)
    model.materialize("cpu")
    plan = load_plan(model.model, PretrainedFolder(folder))
    with torch.no_grad():
        for name, weight in model.named_weights():
            weight.copy_(plan[name].read([0] * weight.dim(), weight.shape))
    return model


def exported(model: PackedCausalLM) -> dict[str, Tensor]:
    weights = dict(model.named_weights())
    pairs = [pair for group in export_plan(model.model) for pair in group.tensors(weights)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("family", families())
def test_loads_what_from_pretrained_loads_and_exports_what_save_pretrained_writes(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path, family)
    model = filled(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same(dict(model.model.state_dict()), dict(theirs.state_dict()))
    same(dict(model.model.named_buffers()), dict(theirs.named_buffers()))
    theirs.save_pretrained(tmp_path / "again")
    same(exported(model), load_file(tmp_path / "again" / "model.safetensors"))


def test_a_folder_of_several_files_is_read_alike(tmp_path: Path) -> None:
    one = tiny_folder(tmp_path / "one", "qwen3_moe")
    many = tiny_folder(tmp_path / "many", "qwen3_moe", shard_size="100KB")
    assert not (many / "model.safetensors").exists()
    same(exported(filled(one)), exported(filled(many)))


def test_bfloat16_weights_fill_a_float32_model(tmp_path: Path) -> None:
    folder = tmp_path / "bf16"
    tiny_model("qwen3_moe").bfloat16().save_pretrained(folder)
    plan = load_plan(build_causal_lm(folder).model, PretrainedFolder(folder))
    assert {source.read([0], [1]).dtype for source in plan.values() if len(source.shape) == 1} == {torch.bfloat16}
    assert all(weight.dtype == torch.float32 for _, weight in filled(folder).named_weights())


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_any_block_of_a_weight_can_be_read_alone(tmp_path: Path, family: str) -> None:
    folder = tiny_folder(tmp_path, family)
    model = filled(folder)
    plan = load_plan(model.model, PretrainedFolder(folder))
    for name, weight in model.named_weights():
        assert plan[name].shape == weight.shape
        for offset, shape in blocks(weight.shape):
            index = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
            assert torch.equal(plan[name].read(offset, shape), weight[index]), (name, offset, shape)


def blocks(shape: torch.Size) -> list[tuple[list[int], list[int]]]:
    """A few rows; the last rows; a block in the middle of every dimension; nothing."""
    zeros, full = [0] * len(shape), list(shape)
    rows = max(1, full[0] // 3)
    middle = [n // 4 for n in full], [max(1, n // 2) for n in full]
    return [
        (zeros, [rows, *full[1:]]),
        ([full[0] - rows, *zeros[1:]], [rows, *full[1:]]),
        middle,
        (zeros, [0, *full[1:]]),
    ]


def test_a_rank_reads_only_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PretrainedFolder(tiny_folder(tmp_path, "qwen3_moe"))
    plan = load_plan(build_causal_lm(folder.path).model, folder)
    read: list[str] = []
    original = PretrainedFolder.read
    monkeypatch.setattr(
        PretrainedFolder, "read", lambda self, name, index=None: read.append(name) or original(self, name, index)
    )
    source = plan["model.layers.1.mlp.experts.gate_up_proj"]
    source.read([2, 0, 0], [2, *source.shape[1:]])
    prefix = "model.layers.1.mlp.experts"
    assert sorted(read) == [f"{prefix}.{e}.{part}_proj.weight" for e in (2, 3) for part in ("gate", "up")]


def test_a_fused_folder_stays_fused(tmp_path: Path) -> None:
    folder = tmp_path / "fused"
    tiny_model("qwen3_moe").save_pretrained(folder, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    same(exported(filled(folder)), load_file(folder / "model.safetensors"))


def test_weights_of_a_bare_backbone_are_recognised(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama_tied")
    whole = exported(filled(folder))

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, strip)
    same(exported(filled(folder)), whole)


def test_a_tied_head_that_the_folder_holds_as_well_is_left_out(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama_tied")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = filled(folder)
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert "lm_head.weight" not in exported(model)


def test_a_tied_head_alone_fills_the_embedding(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama_tied")
    want = exported(filled(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    same(exported(filled(folder)), want)


def test_a_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama_tied")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match=r"ties lm_head.weight to model.embed_tokens.weight.*other values"):
        load_plan(build_causal_lm(folder).model, PretrainedFolder(folder))


def faults(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_plan(build_causal_lm(folder).model, PretrainedFolder(folder))
    return str(caught.value)


def test_missing_unexpected_and_wrongly_shaped_weights_are_named_together(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.extra.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(255, 64)

    rewrite(folder, spoil)
    message = faults(folder)
    assert "missing: model.norm.weight;" in message
    assert "unexpected: model.layers.7.extra.weight;" in message
    assert "wrong shape: lm_head.weight has shape [255, 64], the model's is [256, 64]" in message
    assert str(folder) in message
    assert "Qwen3ForCausalLM" in message


def test_integers_are_quantized_weights(tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        key = "model.layers.1.self_attn.q_proj.weight"
        tensors[key] = (tensors[key] * 99).to(torch.int8)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    folder = tiny_folder(tmp_path, "llama")
    rewrite(folder, quantize)
    said = "quantized: lm_head.weight is float8_e4m3fn, model.layers.1.self_attn.q_proj.weight is int8"
    with pytest.raises(ModelError, match=said):
        filled(folder)


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_a_missing_expert_is_found(tmp_path: Path, part: str) -> None:
    folder = tiny_folder(tmp_path, "mixtral")
    rewrite(folder, lambda t: t.pop(f"model.layers.1.block_sparse_moe.experts.7.{part}.weight"))
    assert "model.layers.1.mlp.experts." in faults(folder)


def test_an_expert_of_another_shape_is_found(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "mixtral")
    rewrite(folder, lambda t: t.update({"model.layers.1.block_sparse_moe.experts.3.w2.weight": torch.zeros(64, 95)}))
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in faults(folder)


def test_more_layers_than_config_says_are_unexpected(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert "unexpected: model.layers.1.input_layernorm.weight" in faults(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    filled(folder)


def test_a_buffer_that_cannot_be_computed_again_is_named(tmp_path: Path) -> None:
    model = build_causal_lm(tiny_folder(tmp_path, "llama"))
    model.model.model.norm.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM keeps model.norm.table outside"):
        model.materialize("cpu")


def test_rebuilding_buffers_touches_no_weight(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "gemma2", "gpt2"):
        model = tiny_model(family)
        before = {name: tensor.clone() for name, tensor in [*model.state_dict().items(), *model.named_buffers()]}
        rebuild_buffers(model)
        same(dict(before), dict([*model.state_dict().items(), *model.named_buffers()]))
