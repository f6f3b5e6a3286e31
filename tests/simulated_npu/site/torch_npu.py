"""In place of Ascend's adapter: importing it gives the process the simulated device.

For tests; they put this folder on the path of processes that want the device.
"""

from __future__ import annotations

from typing import Any

import torch

from simulated_npu.installing import install

install()
npu = torch.npu

__all__ = ["npu", "npu_fusion_attention"]


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """transformers imports it where it finds the device; it calls it for flash attention alone."""
    raise NotImplementedError("the simulated NPU has no kernels of its own")
