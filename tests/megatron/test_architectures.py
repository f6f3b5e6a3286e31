"""What is read from config.json is what transformers builds from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.testing.tiny import FAMILIES, tiny_config
from engines_megatron.architectures import SUPPORTED, read_architecture

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name, config in FAMILIES.items() if config["model_type"] in SUPPORTED},
    "llama_tied": ("llama_tied", {}),
    "mixtral, width of heads left out": ("mixtral", {"head_dim": None}),
    "qwen3_moe, not scaled": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, dense first": ("qwen3_moe", {"num_hidden_layers": 5, "mlp_only_layers": [0, 3]}),
    "qwen3_moe, every other": ("qwen3_moe", {"num_hidden_layers": 5, "decoder_sparse_step": 2}),
    "qwen3_moe, none": ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
}
OLDER: dict[str, Any] = {"rope_theta": 5000.0, "rope_scaling": None, "torch_dtype": "bfloat16", "pretraining_tp": 1}


def agrees(config: dict[str, Any]) -> None:
    hf = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = read_architecture(config)
    first = "model.layers.0.self_attn."
    assert found.model_type == hf.model_type
    assert found.num_layers == len(model.model.layers)
    assert shapes["model.embed_tokens.weight"] == (found.vocab_size, found.hidden_size)
    assert shapes[first + "q_proj.weight"] == (found.num_heads * found.head_dim, found.hidden_size)
    assert shapes[first + "k_proj.weight"] == (found.num_kv_heads * found.head_dim, found.hidden_size)
    assert (found.num_heads, found.head_dim) == (hf.num_attention_heads, model.model.layers[0].self_attn.head_dim)
    assert found.qkv_bias is (first + "v_proj.bias" in shapes)
    assert first + "o_proj.bias" not in shapes
    assert found.qk_norm is (first + "q_norm.weight" in shapes)
    assert found.tied is (model.lm_head.weight is model.model.embed_tokens.weight)
    assert found.norm_eps == model.model.norm.variance_epsilon
    assert found.max_position_embeddings == hf.max_position_embeddings
    assert found.initializer_range == hf.initializer_range
    mixtures = tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert (found.experts.layers if found.experts else (False,) * found.num_layers) == mixtures
    for layer, is_mixture in zip(model.model.layers, mixtures, strict=True):
        if is_mixture:
            experts = found.experts
            assert experts is not None
            assert layer.mlp.experts.down_proj.shape == (
                experts.number, found.hidden_size, experts.ffn_hidden_size,
            )  # fmt: skip
            assert layer.mlp.gate.top_k == experts.top_k
            assert experts.normalized is bool(getattr(layer.mlp.gate, "norm_topk_prob", True))
        else:
            assert layer.mlp.up_proj.weight.shape == (found.ffn_hidden_size, found.hidden_size)


@pytest.mark.parametrize("name", CASES)
def test_as_transformers_saves_it(name: str) -> None:
    family, overrides = CASES[name]
    agrees(json.loads(tiny_config(family, **overrides).to_json_string()))


@pytest.mark.parametrize("family", SUPPORTED)
def test_as_earlier_transformers_saved_it(family: str) -> None:
    config = {**json.loads(tiny_config(family).to_json_string()), **OLDER}
    del config["rope_parameters"]
    if family in ("llama", "qwen2", "qwen3"):
        config["num_key_value_heads"] = None
    if family == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    agrees(config)
