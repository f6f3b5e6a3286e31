"""What of a model folder's config.json the engine builds; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Values of `model_type` that can be built."""


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model."""

    number: int
    top_k: int
    ffn_hidden_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    layers: tuple[bool, ...]
    """For each decoder layer, whether it is a mixture (else it is dense)."""


@dataclass(frozen=True)
class Architecture:
    """A decoder of the llama kind: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    tied: bool
    """Whether the head is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    initializer_range: float
    experts: Experts | None


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes. Raises `ModelError` for what can't be built, by name."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise ModelError(f"model_type {kind!r} is not one that Megatron-Core builds here: {', '.join(SUPPORTED)}")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    experts = None
    if kind in ("qwen3_moe", "mixtral"):
        dense = set(config.get("mlp_only_layers") or ())
        step = config.get("decoder_sparse_step", 1)
        experts = Experts(
            number=config["num_local_experts" if "num_local_experts" in config else "num_experts"],
            top_k=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
            normalized=kind == "mixtral" or bool(config.get("norm_topk_prob", False)),
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        )
    return Architecture(
        model_type=str(kind),
        num_layers=layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        initializer_range=config.get("initializer_range", 0.02),
        experts=experts,
    )
