"""A live engine on one rank of a world, for tests of what `TrainingWorker` does not show."""

from __future__ import annotations

import gc

import torch

from engines.testing.live import Fail, live_groups, opened, share, train_step, weights
from engines.testing.runs import OPTIMIZER

__all__ = ["OPTIMIZER", "Fail", "live_groups", "live_tensors", "opened", "share", "train_step", "weights"]


def live_tensors() -> int:
    """Tensors of a model's size, wherever they are referred to."""
    gc.collect()
    return sum(1 for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.numel() > 500)
