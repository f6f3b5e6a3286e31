"""Gives this process what `import torch_npu` gives on a machine with NPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SITE = str(Path(__file__).with_name("site"))
"""The folder to put on the path of a process that shall find `torch_npu`."""
PYTHONPATH = os.pathsep.join((SITE, str(Path(__file__).parents[1])))
"""The same for a process that is not a test's own; `ENGINES_DEVICE=npu` says there that the device is present."""


def install() -> None:
    """The device `npu`, `torch.npu`, and the backend `hccl`; may be called again.

    Call it before the first backward of the process: autograd counts the devices once.
    """
    if hasattr(torch, "npu"):
        return
    from simulated_npu import npu

    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("hccl", _create_hccl, devices=["npu"])


def _create_hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    from simulated_npu.extension import extension

    return extension.make_hccl(dist.ProcessGroupGloo(store, rank, size, timeout))
