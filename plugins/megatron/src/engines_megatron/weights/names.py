"""Names and shapes of the tensors that `save_pretrained` writes for an architecture.

Checked against folders that transformers 5.24 wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from engines_megatron.architectures import Architecture

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The head of a value model, as the `*ForSequenceClassification` models of transformers name it."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MixtureNames:
    """What a family calls the parts of its mixture-of-experts layers."""

    module: str
    gate: str
    up: str
    down: str


_MIXTURES = {
    "qwen3_moe": MixtureNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": MixtureNames("block_sparse_moe", "w1", "w3", "w2"),
}


def mixture_names(architecture: Architecture) -> MixtureNames:
    """The names that `architecture`, which has experts, uses."""
    return _MIXTURES[architecture.model_type]


@cache
def tensor_shapes(architecture: Architecture, model_type: str) -> Mapping[str, Shape]:
    """Every tensor of the model in order of depth, by name; a tied head is left out, experts come one by one.

    `model_type`: "language_model", or "value_model", whose head is `score.weight`.
    """
    hidden = architecture.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (architecture.vocab_size, hidden)}
    for layer in range(architecture.num_layers):
        shapes.update(_layer(architecture, layer))
    shapes[NORM] = (hidden,)
    if model_type == "value_model":
        shapes[SCORE] = (1, hidden)
    elif not architecture.tied:
        shapes[HEAD] = (architecture.vocab_size, hidden)
    return MappingProxyType(shapes)


def _layer(architecture: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    prefix, hidden = f"model.layers.{layer}.", architecture.hidden_size
    yield prefix + "input_layernorm.weight", (hidden,)
    yield from _attention(architecture, prefix + "self_attn.")
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    experts = architecture.experts
    if experts is None or not experts.layers[layer]:
        width = architecture.ffn_hidden_size
        yield prefix + "mlp.gate_proj.weight", (width, hidden)
        yield prefix + "mlp.up_proj.weight", (width, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, width)
        return
    names, width = mixture_names(architecture), experts.ffn_hidden_size
    yield f"{prefix}{names.module}.gate.weight", (experts.number, hidden)
    for expert in range(experts.number):
        at = f"{prefix}{names.module}.experts.{expert}."
        yield f"{at}{names.gate}.weight", (width, hidden)
        yield f"{at}{names.up}.weight", (width, hidden)
        yield f"{at}{names.down}.weight", (hidden, width)


def _attention(architecture: Architecture, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, queries = architecture.hidden_size, architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{prefix}{part}_proj.weight", (rows, hidden)
        if architecture.qkv_bias:
            yield f"{prefix}{part}_proj.bias", (rows,)
    yield prefix + "o_proj.weight", (hidden, queries)
    if architecture.qk_norm:
        yield prefix + "q_norm.weight", (architecture.head_dim,)
        yield prefix + "k_norm.weight", (architecture.head_dim,)
