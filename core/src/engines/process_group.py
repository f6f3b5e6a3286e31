"""The default process group: made from what the launcher, torchrun or nobody set."""

from __future__ import annotations

import datetime
import os
import tempfile

import torch
import torch.distributed as dist

from engines.errors import LaunchError

RENDEZVOUS = "ENGINES_RENDEZVOUS"
"""URL at which the ranks of `engines train`'s own launcher meet; torchrun's ranks use MASTER_ADDR instead."""


def ensure_process_group(device: torch.device, dist_backend: str, timeout_s: float) -> bool:
    """Initialise the default group unless somebody has; returns whether it was made here (and is ours to destroy).

    Reads RANK and WORLD_SIZE (absent: one process). Accelerators get gloo beside their own backend, so that
    small host-side agreement needs no device memory.
    """
    if dist.is_initialized():
        return False
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    url = os.environ.get(RENDEZVOUS)
    if url is None and size == 1 and "MASTER_ADDR" not in os.environ:
        url = f"file://{tempfile.mkdtemp(prefix='engines-')}/rendezvous"
    elif url is None and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"WORLD_SIZE is {size}, but neither {RENDEZVOUS} nor MASTER_ADDR says where ranks meet",
            "start with `engines train` or torchrun",
        )
    dist.init_process_group(
        dist_backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist_backend}",
        init_method=url or "env://",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return True


def select_device(device: torch.device) -> None:
    """Make `device` the current one of its kind, before any group or tensor uses it."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
