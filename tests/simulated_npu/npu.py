"""`torch.npu` of the simulated device: of what torch_npu puts there, the part that engines and frameworks call.

Torch's own `torch.accelerator` does the work, as for any device. Import it through `simulated_npu.installing`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Event, Stream
from torch.accelerator import (
    current_device_index as current_device,
)
from torch.accelerator import (
    current_stream,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)
from torch.accelerator import (
    get_memory_info as mem_get_info,
)
from torch.accelerator import (
    set_device_index as set_device,
)

from simulated_npu.extension import extension

__all__ = [
    "Event",
    "Stream",
    "amp",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

Device = torch.device | str | int | None

device_count = extension.device_count
default_generators = tuple(extension.default_generator(index) for index in range(device_count()))
is_initialized = extension.is_initialized
init = _lazy_init = extension.initialize
amp = SimpleNamespace(autocast=partial(torch.autocast, "npu"), GradScaler=partial(torch.amp.GradScaler, "npu"))


class device:
    """Makes a device the current one for the length of a `with` block; None or -1 leaves it."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *exception: object) -> None:
        set_device(self._before)


def is_available() -> bool:
    return device_count() > 0


def stream(stream: Stream | None) -> AbstractContextManager[object]:
    """Makes a stream the current one for the length of a `with` block; None leaves it."""
    return nullcontext() if stream is None else stream


def default_stream(device: Device = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Device = "npu") -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def get_device_name(device: Device = None) -> str:
    return "Simulated NPU"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(device), total_memory=extension.TOTAL_MEMORY)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_call(callback: Any, **_: Any) -> None:
    callback()


def _index(device: Device) -> int:
    index = device if isinstance(device, int) else torch.device(device or "npu").index
    return current_device() if index is None or index < 0 else index


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch.utils.checkpoint saves the generators of a module that says so
        return is_initialized()
    raise AttributeError(f"module 'torch.npu' has no attribute {name!r}")
