"""What was built, held to what was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from engines.config import EngineConfig
from engines.errors import ContractError
from engines.registry import Selection


def check_layout(built: Mapping[str, int], config: EngineConfig, selection: Selection) -> None:
    """Raise `ContractError` if a size of `built`, as the engine describes it, isn't that of the settings."""
    asked = config.sizes(dist.get_world_size() if dist.is_initialized() else 1)
    differ = {name: size for name, size in asked.items() if built.get(name) != size}
    off = [f"{name} is {built.get(name)} instead of {size}" for name, size in differ.items()]
    if off:
        engine = f"{selection.backend} on {selection.device} ({selection.distribution})"
        raise ContractError(
            f"{engine} built another layout than was asked for: {', '.join(off)}",
            f"Ask for what it builds, and tell its authors: {selection.distribution} declares what it doesn't do.",
        )
