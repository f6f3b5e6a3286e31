"""Copies of a rank's tensors in host memory, while training changes the tensors themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_THREADS = 2
"""One alone doesn't fill the memory's bandwidth, nor make fresh pages as fast as two."""


class HostCopies:
    """Memory for the copies, which is kept for the next save: fresh pages cost more than copying.

    Of an accelerator's tensors pinned, so that they all travel at once.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def take(self, files: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copy all entries; what the last call returned is overwritten."""
        before, self._held = self._held, {}
        copied: dict[str, dict[str, Tensor]] = {}
        on_cpu: list[tuple[Tensor, Tensor]] = []
        devices = set()
        for file, entries in files.items():
            for entry, tensor in entries.items():
                held = before.pop((file, entry), None)
                if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                    on_device = tensor.device.type != "cpu"
                    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
                self._held[file, entry] = copied.setdefault(file, {})[entry] = held
                if tensor.device.type == "cpu":
                    on_cpu.append((held, tensor.detach()))
                else:
                    held.copy_(tensor.detach(), non_blocking=True)
                    devices.add(tensor.device)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda pair: pair[0].copy_(pair[1]), on_cpu))
        for device in devices:
            torch.accelerator.synchronize(device)
        return copied
