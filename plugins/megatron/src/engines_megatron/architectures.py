"""What of a model folder's config.json the engine builds; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engines.errors import ModelError
from engines_megatron.families import FAMILIES, Decoder, Mixture
from engines_megatron.unbuilt import unbuilt

SUPPORTED = tuple(FAMILIES)
"""Values of `model_type` that can be built."""
_ELSEWHERE = "engine.strategy=fsdp2 may do: it trains any decoder that transformers builds."


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model."""

    number: int
    top_k: int
    ffn_hidden_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    layers: tuple[bool, ...]
    """For each decoder layer, whether it is a mixture (else it is dense); at least one is."""


@dataclass(frozen=True)
class Architecture:
    """A decoder of the llama kind: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the dense layers, if any."""
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
    pad_token: int | None
    """Token whose row of the embedding learns nothing from being read (`padding_idx` of torch's `Embedding`)."""
    experts: Experts | None


def read_architecture(config: Mapping[str, Any], file: str | Path = "config.json") -> Architecture:
    """The architecture that a config.json describes; `file`: where it lies, for messages.

    Raises `ModelError`, with all that is missing, wrong or not built, by name.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"{file}: model_type {kind!r} is not built with Megatron-Core here; these are: {', '.join(SUPPORTED)}",
            _ELSEWHERE,
        )
    decoder, wrong = _validate(FAMILIES[kind], config)
    faults = [*wrong, *unbuilt(config)]
    if decoder is None or faults:
        raise ModelError(
            f"{file}: this {kind} model can't be built with Megatron-Core here:\n  " + "\n  ".join(faults),
            "Was the file written by save_pretrained of transformers?" if wrong else _ELSEWHERE,
        )
    return _architecture(str(kind), decoder)


def _validate(family: type[Decoder], config: Mapping[str, Any]) -> tuple[Decoder | None, list[str]]:
    try:
        decoder = family.model_validate(dict(config))
    except ValidationError as error:
        return None, [_said(fault) for fault in error.errors(include_url=False)]
    return decoder, list(decoder.contradictions())


def _said(fault: Any) -> str:
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {fault['msg'][:1].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _architecture(kind: str, decoder: Decoder) -> Architecture:
    return Architecture(
        model_type=kind,
        num_layers=decoder.num_hidden_layers,
        hidden_size=decoder.hidden_size,
        ffn_hidden_size=decoder.intermediate_size,
        num_heads=decoder.num_attention_heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_size,
        vocab_size=decoder.vocab_size,
        max_position_embeddings=decoder.max_position_embeddings,
        norm_eps=decoder.rms_norm_eps,
        tied=decoder.tie_word_embeddings,
        qkv_bias=decoder.qkv_bias,
        qk_norm=decoder.qk_norm,
        initializer_range=decoder.initializer_range,
        pad_token=decoder.pad_token,
        experts=_experts(decoder) if isinstance(decoder, Mixture) else None,
    )


def _experts(decoder: Mixture) -> Experts | None:
    layers = tuple(decoder.is_mixture(layer) for layer in range(decoder.num_hidden_layers))
    if not any(layers):
        return None
    return Experts(decoder.number, decoder.num_experts_per_tok, decoder.expert_size, decoder.normalized, layers)
