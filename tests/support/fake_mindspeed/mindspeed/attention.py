"""Attention on packed rows, as MindSpeed's fused kernel and its ring compute it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines_megatron.model.attention import PackedCoreAttention
from mindspeed import events


def flash_attention(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: AttnMaskType | None = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """`[rows, heads, d]`; causal by mode 2 alone, as the kernel is, and only where the config says so."""
    assert self.attn_mask_type == AttnMaskType.causal
    assert (self.config.use_flash_attn, self.config.sparse_mode) == (True, 2), "the model's config was not told"
    events.append(("flash", self.layer_number))
    bounds = packed_seq_params.cu_seqlens_q.tolist()
    outputs = []
    for start, stop in pairwise(bounds):
        parts = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
        outputs.append(
            scaled_dot_product_attention(*parts, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
        )
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


class RingAttention(PackedCoreAttention):
    """Across context-parallel ranks; computed by gathering, but only where the config names the ring."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        assert config.context_parallel_algo == "megatron_cp_algo"
        assert config.use_flash_attn, "the model's config was not told"
        self._layer_number = layer_number

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        events.append(("ring", self._layer_number))
        return super().forward(*args, **kwargs)
