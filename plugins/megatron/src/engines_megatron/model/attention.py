"""Core attention of the local layer spec: packed sequences and context parallelism.

Megatron-Core's own `DotProductAttention` refuses both. Each sequence attends to itself alone, causally, by torch's
`scaled_dot_product_attention`; sequences of equal length next to each other are computed together, and no mask
over the whole row is ever built.

Under context parallelism of size cp a sequence is cut into 2 * cp equal chunks of which rank r holds r and
2 * cp - 1 - r, so that causal attention costs every rank the same: the order that Megatron's rotary embedding
assumes (`rope_utils.py`, `_get_thd_freqs_on_this_cp_rank`). Keys and values are gathered, and a rank's two chunks
of queries each attend to the sequence up to their own end.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engines.models.attention import Packing, packed_attention
from engines_megatron.rows import Packed


class PackedCoreAttention(nn.Module):
    """Causal attention within each packed sequence; has no parameters. Built by Megatron from the spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        assert attention_type == "self", attention_type
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        assert config.window_size is None and config.softmax_type == "vanilla"
        assert not config.apply_query_key_layer_scaling
        assert pg_collection is not None
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._context = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """`query` `[rows, heads, d]`, `key` and `value` `[rows, kv_heads, d]` of one rank; returns `query`'s shape.

        `packed_seq_params` is a `Packed`. All context-parallel ranks call it together, again under recomputation.
        """
        assert isinstance(packed_seq_params, Packed)
        assert attention_mask is None and attention_bias is None
        if self._context.size() > 1:
            return self._across_ranks(query, key, value, packed_seq_params.lengths)
        rows = (part.transpose(0, 1)[None] for part in (query, key, value))
        packing = Packing.of(packed_seq_params.lengths)
        return packed_attention(self, *rows, None, packing=packing, scaling=self._scale)[0][0]

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        size, rank = self._context.size(), self._context.rank()
        # one collective for both; its backward sums over the ranks what they owe to this one's rows
        both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self._context)
        chunks = Packing.of([length // (2 * size) for length in lengths])
        rows = [count * 2 * chunk for count, chunk in chunks.runs]
        outputs = []
        for (count, chunk), held_q, held_kv in zip(
            chunks.runs, query.split(rows), both.unflatten(0, (size, -1)).split(rows, 1), strict=True
        ):
            q = held_q.unflatten(0, (count, 2, chunk))
            kv = _in_order(held_kv.unflatten(1, (count, 2, chunk)))
            k, v = kv.split([key.shape[-1], value.shape[-1]], -1)
            ends = ((rank + 1) * chunk, (2 * size - rank) * chunk)
            halves = [self._to_prefix(q[:, half], k[:, :end], v[:, :end]) for half, end in enumerate(ends)]
            outputs.append(torch.stack(halves, 1).flatten(0, 2))
        return torch.cat(outputs)

    def _to_prefix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention `[n, chunk, heads, d]` of each sequence's chunk to all up to the chunk's end."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        visible = causal_lower_right(q.shape[2], k.shape[2])
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, visible, scale=self._scale, enable_gqa=grouped)
        return out.transpose(1, 2)


def _in_order(held: Tensor) -> Tensor:
    """From what each rank holds, `[cp, n, 2, chunk, ...]`, the sequences `[n, 2 * cp * chunk, ...]`."""
    early, late = held.unbind(2)
    return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)
