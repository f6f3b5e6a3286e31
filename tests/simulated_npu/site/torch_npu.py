"""In place of Ascend's adapter: importing it gives the process the simulated device.

For tests; they put this folder on the path of processes that want the device.
"""

from __future__ import annotations

import torch

from simulated_npu.installing import install

install()
npu = torch.npu

__all__ = ["npu"]
