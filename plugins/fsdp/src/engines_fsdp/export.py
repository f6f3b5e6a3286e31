"""The weights as a lazy stream of full tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.models import PackedCausalLM, export_plan


def export_weights(model: PackedCausalLM, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) as `save_pretrained` would write them, floating-point ones as `dtype`.

    Every rank drains it: each step gathers one group of weights (one tensor, or the experts of one layer),
    which is all that it holds beside the model.
    """
    weights = dict(model.named_weights())
    for group in export_plan(model.model):
        yield from group.tensors({name: _full(weights[name], dtype) for name in group.names})


@torch.no_grad()
def _full(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast before gathering: half the bytes travel. Always a tensor of its own, never the model's memory."""
    cast = weight.detach().to(dtype if weight.is_floating_point() else weight.dtype)
    if isinstance(cast, DTensor):
        return cast.full_tensor()
    return cast.clone() if cast.data_ptr() == weight.data_ptr() else cast
