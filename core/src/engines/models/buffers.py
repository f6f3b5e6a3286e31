"""Buffers that no checkpoint holds (rotary frequencies, scales), computed again after a build on "meta"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.errors import ModelError


@torch.no_grad()
def rebuild_buffers(model: Any) -> None:
    """Fill the non-persistent buffers of a transformers model as its constructor would, in place.

    transformers builds every pretrained model on "meta" itself and then lets `_init_weights` fill such buffers;
    the same is done here, with all weights marked as initialised so that none is touched. A buffer that this
    leaves as it was raises `ModelError`.
    """
    saved = model.state_dict(keep_vars=True)
    for tensor in saved.values():
        tensor._is_hf_initialized = True
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    zeros, ones = (_filled(model, buffers, start) for start in (0, 1))
    untouched = sorted(name for name in buffers if not torch.equal(zeros[name], ones[name]))
    if untouched:
        raise ModelError(
            f"{type(model).__name__} keeps {', '.join(untouched)} outside its checkpoint, and transformers does not "
            "say how to compute it without building the whole model in memory"
        )


def _filled(model: Any, buffers: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """The buffers as `_init_weights` fills them, having been all `start`."""
    owners = {name.rpartition(".")[0] for name in buffers}
    for buffer in buffers.values():
        buffer.fill_(start)
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in owners
    model.initialize_weights()
    return {name: buffer.clone() for name, buffer in buffers.items()}
