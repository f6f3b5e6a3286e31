"""AdamW, gradient clipping and learning-rate schedules: one meaning for every engine whose tensors allow it.

Works on plain tensors and DTensors of any mesh, mixed or not.
"""

from engines.optimizer.adamw import build_adamw
from engines.optimizer.clipping import clip_gradients, gradient_norm, not_finite, sum_of_squares, sum_over_ranks
from engines.optimizer.optimizer import Optimizer
from engines.optimizer.schedule import Schedule, learning_rate

__all__ = [
    "Optimizer",
    "Schedule",
    "build_adamw",
    "clip_gradients",
    "gradient_norm",
    "learning_rate",
    "not_finite",
    "sum_of_squares",
    "sum_over_ranks",
]
