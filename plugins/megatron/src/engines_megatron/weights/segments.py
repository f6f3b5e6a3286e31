"""Which rows of a global Megatron tensor are which rows of which Hugging Face tensor.

Keys are those of Megatron's `sharded_state_dict` with `singleton_local_shards`: layers and experts have their
numbers in the whole model, and the two halves of a gated `linear_fc1` are tensors of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from engines_megatron.architectures import Architecture
from engines_megatron.weights.names import EMBEDDING, HEAD, NORM, SCORE, Shape, mixture_names, tensor_shapes

_OUTSIDE = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": NORM,
    "output_layer.weight": HEAD,
    "score.weight": SCORE,
}
# of the norms the first spelling is the plain modules', the second TransformerEngine's, which are fused with
# the linear layer behind them
_IN_A_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(\d+)\.(.+)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")


class Segment(NamedTuple):
    """Consecutive rows of one Hugging Face tensor."""

    name: str
    first: int
    rows: int


def tensor_shape(name: str, architecture: Architecture) -> Shape:
    """Shape of a Hugging Face tensor of the language model or the value model of `architecture`."""
    return tensor_shapes(architecture, "value_model" if name == SCORE else "language_model")[name]


def segments(key: str, architecture: Architecture) -> list[Segment]:
    """What the rows of the Megatron tensor `key` are, from the first on, whatever the layout.

    Rows behind the last segment only fill up a vocabulary that tensor parallelism doesn't divide. Raises
    `KeyError` for a tensor that no Hugging Face model of the family has.
    """
    if key in _OUTSIDE:
        return [_whole(_OUTSIDE[key], architecture)]
    layer = _LAYER.fullmatch(key)
    if layer is None:
        raise KeyError(key)
    prefix, rest = f"model.layers.{layer[1]}.", layer[2]
    if qkv := _QKV.fullmatch(rest):
        return list(_interleaved(f"{prefix}self_attn.", qkv[1], architecture))
    return [_whole(prefix + _in_a_layer(rest, architecture), architecture)]


def _whole(name: str, architecture: Architecture) -> Segment:
    return Segment(name, 0, tensor_shape(name, architecture)[0])


def _in_a_layer(rest: str, architecture: Architecture) -> str:
    if rest in _IN_A_LAYER:
        return _IN_A_LAYER[rest]
    names = mixture_names(architecture)
    if rest == "mlp.router.weight":
        return f"{names.module}.gate.weight"
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        raise KeyError(rest)
    parts = {"linear_fc1.weight_w": names.gate, "linear_fc1.weight_v": names.up, "linear_fc2.weight": names.down}
    return f"{names.module}.experts.{expert[1]}.{parts[expert[2]]}.weight"


def _interleaved(prefix: str, kind: str, architecture: Architecture) -> Iterator[Segment]:
    """The queries, the key and the value of each query group, one group after the other."""
    head = architecture.head_dim
    queries = architecture.num_heads // architecture.num_kv_heads * head
    for group in range(architecture.num_kv_heads):
        yield Segment(f"{prefix}q_proj.{kind}", group * queries, queries)
        yield Segment(f"{prefix}k_proj.{kind}", group * head, head)
        yield Segment(f"{prefix}v_proj.{kind}", group * head, head)
