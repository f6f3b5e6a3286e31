"""torch.cuda answered by torch.npu, and "cuda" meaning "npu", in the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

SERVICES = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
)
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
    "zeros_like",
)


def redirect() -> None:
    for name in SERVICES:
        setattr(torch.cuda, name, getattr(torch.npu, name))
    for name in ("get_rng_state", "manual_seed", "manual_seed_all", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.npu, name))
    torch.cuda._lazy_init, torch.cuda._lazy_call = torch.npu._lazy_init, torch.npu._lazy_call
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    for holder, names in ((torch, FACTORIES), (torch.Tensor, ("to",)), (torch.nn.Module, ("to",))):
        for name in names:
            setattr(holder, name, _on_npu(getattr(holder, name)))
    torch.Tensor.is_cuda = property(lambda self: self.device.type == "npu")
    torch.Tensor.cuda = lambda self, *_, **__: self.to("npu")
    kind = torch.Tensor.type
    torch.Tensor.type = functools.wraps(kind)(lambda self, *a, **k: _said(kind(self, *a, **k)))


def _on_npu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _meant(kwargs["device"])
        return function(*map(_meant, args), **kwargs)

    return redirected


def _meant(device: Any) -> Any:
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("npu", device.index) if device.index is not None else torch.device("npu")
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return f"npu{device[4:]}"
    return device


def _said(kind: Any) -> Any:
    return kind.replace("npu", "cuda") if isinstance(kind, str) else kind
