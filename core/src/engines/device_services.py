"""What a process gets of its device while it runs: memory figures, streams, random state, autocast.

For any device that torch knows, built in or brought by an extension: `torch.cuda`, `torch.npu`, ... offer the same
under the same names. torch is imported when something is first asked of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of this process's tensors on its device, as torch's allocator counts them."""

    allocated: int
    peak: int
    """The most that was allocated at once since the last `reset_peak_memory`, or since the process began."""


@dataclass(frozen=True)
class DeviceServices:
    """The services of one device, for this process alone; no rank waits for another."""

    device: torch.device

    @property
    def is_accelerator(self) -> bool:
        """Whether it has memory and a generator of its own; the CPU's are the process's."""
        return self.device.type != "cpu"

    def select(self) -> None:
        """Make it the current one of its kind, before any group or tensor uses it."""
        self._module.set_device(self.device)

    def is_in_use(self) -> bool:
        """Whether its libraries have been started, and have read their environment variables by now."""
        return self.is_accelerator and bool(self._module.is_initialized())

    def memory(self) -> DeviceMemory | None:
        """Its memory figures; None on the CPU, where torch counts nothing."""
        if not self.is_accelerator:
            return None
        module = self._module
        return DeviceMemory(module.memory_allocated(self.device), module.max_memory_allocated(self.device))

    def reset_peak_memory(self) -> None:
        """Let the peak be counted anew."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats(self.device)

    def free_cached_memory(self) -> None:
        """Give back what torch keeps for later tensors, once an engine's own are gone."""
        if self.is_accelerator:
            self._module.empty_cache()

    def current_stream(self) -> Any:
        """The stream on which this thread's work is queued."""
        return self._module.current_stream(self.device)

    def synchronize(self) -> None:
        """Wait until all that was queued has run."""
        self._module.synchronize(self.device)

    def rng_state(self) -> Tensor:
        """The state of its default generator, a uint8 tensor on the CPU."""
        import torch

        return self._module.get_rng_state(self.device) if self.is_accelerator else torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Set what `rng_state` returned, on a device of the same kind."""
        import torch

        if self.is_accelerator:
            self._module.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """A context in which matrix products and what else gains by it compute in `dtype`."""
        import torch

        return torch.autocast(self.device.type, dtype)

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device)
