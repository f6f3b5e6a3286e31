"""The default process group: made from what the launcher, torchrun or nobody set."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines.errors import LaunchError

RENDEZVOUS = "ENGINES_RENDEZVOUS"
"""URL at which the ranks of `engines train`'s own launcher meet; torchrun's ranks use MASTER_ADDR instead."""


@dataclass
class _Made:
    """The default group, if it was made here."""

    users: int = 0


_made = _Made()


def join_process_group(device: torch.device, dist_backend: str, timeout_s: float) -> bool:
    """Initialise the default group unless somebody has; returns whether it is ours, to be left once by each caller.

    Several users in one process share it; the last one to leave destroys it. Reads RANK and WORLD_SIZE (absent: one
    process). Accelerators get gloo beside their own backend: small host-side agreement needs no device memory.
    """
    if not dist.is_initialized():
        _initialise(device, dist_backend, datetime.timedelta(seconds=timeout_s))
        _made.users = 0
    elif not _made.users:
        return False
    _made.users += 1
    return True


def leave_process_group() -> None:
    """Give up one share of the group; without users it is destroyed."""
    _made.users -= 1
    if not _made.users and dist.is_initialized():
        dist.destroy_process_group()


def _initialise(device: torch.device, dist_backend: str, timeout: datetime.timedelta) -> None:
    backend = dist_backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist_backend}"
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    url = os.environ.get(RENDEZVOUS)
    if url is None and "MASTER_ADDR" not in os.environ:
        if size > 1:
            raise LaunchError(
                f"WORLD_SIZE is {size}, but neither {RENDEZVOUS} nor MASTER_ADDR says where ranks meet",
                "start with `engines train` or torchrun",
            )
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, and missing from __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group(backend, init_method=url or "env://", rank=rank, world_size=size, timeout=timeout)
