"""Losses: they see per-token outputs and the batch, and run on every backend."""

from engines.losses.base import Loss
from engines.losses.sft import SFTLoss

__all__ = ["Loss", "SFTLoss"]
