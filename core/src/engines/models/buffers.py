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
    the same is done here, with all weights marked as initialised so that none is touched. A buffer that is
    still empty afterwards raises `ModelError`.
    """
    saved = model.state_dict(keep_vars=True)
    for tensor in saved.values():
        tensor._is_hf_initialized = True
    unsaved: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        own = {f"{name}.{key}": buffer for key, buffer in module.named_buffers(recurse=False)}
        own = {key: buffer for key, buffer in own.items() if key.removeprefix(".") not in saved}
        module._is_hf_initialized = not own
        unsaved |= own
    for buffer in unsaved.values():
        buffer.fill_(_unset(buffer))
    model.initialize_weights()
    empty = sorted(name for name, buffer in unsaved.items() if _is_unset(buffer))
    if empty:
        raise ModelError(
            f"{type(model).__name__} keeps {', '.join(empty)} outside its checkpoint, and transformers does not "
            "say how to compute it without building the whole model in memory"
        )
    for module in model.modules():
        module._is_hf_initialized = True


def _unset(buffer: Tensor) -> float | int:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _is_unset(buffer: Tensor) -> bool:
    return bool((buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)).any())
