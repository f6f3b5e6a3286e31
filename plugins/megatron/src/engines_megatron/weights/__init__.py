"""Weights on their way into Megatron's parameters and out of them, by Hugging Face names.

`names` and `segments` say how tensors correspond at every layout, `pieces` which blocks of them this rank holds;
the rest reads and writes those.
"""

from __future__ import annotations

from engines_megatron.weights.export import export_weights
from engines_megatron.weights.gradients import not_finite
from engines_megatron.weights.loading import load_pretrained
from engines_megatron.weights.shards import (
    load_model_shards,
    load_optimizer_shards,
    model_shards,
    optimizer_shards,
)

__all__ = [
    "export_weights",
    "load_model_shards",
    "load_optimizer_shards",
    "load_pretrained",
    "model_shards",
    "not_finite",
    "optimizer_shards",
]
