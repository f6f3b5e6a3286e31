"""Which device this process's Megatron-Core serves: its adaptation can't be undone, so there is one."""

from __future__ import annotations

from engines.errors import LaunchError

_claimed: list[str] = []


def claim(device: str) -> None:
    """Take Megatron-Core for `device`. Raises `LaunchError` if this process has taken it for another."""
    if _claimed and _claimed[0] != device:
        raise LaunchError(
            f"megatron on {device} cannot be loaded: this process has loaded it for {_claimed[0]}, and "
            "Megatron-Core serves one kind of device in a process.",
            "Place them in separate processes.",
        )
    _claimed[:] = [device]
