"""Megatron-Core on CUDA: as it is."""

from __future__ import annotations

from engines_megatron.runtime import kinds


def install() -> None:
    """Note that this process runs Megatron-Core unadapted. Raises `LaunchError` where it has been adapted."""
    kinds.claim("cuda")
