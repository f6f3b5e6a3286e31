"""torch's AdamW, configured from `OptimizerConfig`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from engines.config import OptimizerConfig


def build_adamw(parameters: Iterable[Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameters`, fused; weight decay on every one of them.

    Parameters of different meshes get groups of their own, since one fused kernel takes tensors of one mesh.
    """
    groups: dict[object, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return torch.optim.AdamW(
        [{"params": members} for members in groups.values()],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
