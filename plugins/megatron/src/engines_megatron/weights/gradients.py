"""Whose gradients are not finite, by Hugging Face names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines_megatron.architectures import Architecture
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.weights.pieces import find_pieces


def not_finite(chunks: Sequence[GPTChunk], architecture: Architecture) -> tuple[str, ...]:
    """Tensors of this rank with an infinite element or NaN in Megatron's gradient buffers, in the model's order."""
    names = dict.fromkeys(
        piece.name
        for piece in find_pieces(chunks, architecture)
        if not torch.isfinite(piece.of(piece.parameter.main_grad)).all()
    )
    return tuple(names)
