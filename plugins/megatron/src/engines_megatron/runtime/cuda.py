"""Megatron-Core on CUDA: as it is, but for its noise."""

from __future__ import annotations

from engines_megatron.runtime import kinds
from engines_megatron.runtime.noise import silence


def install() -> None:
    """Note that this process runs Megatron-Core unadapted. Raises `LaunchError` where it has been adapted."""
    kinds.claim("cuda")
    silence()
