"""Weights of a folder or a checkpoint into this rank's chunks: each rank reads its own blocks, none a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engines.agreement import Peers
from engines.checkpoint import open_weights
from engines.models import WeightSource
from engines_megatron.architectures import Architecture
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.weights.names import SCORE
from engines_megatron.weights.pieces import find_pieces, padding
from engines_megatron.weights.source import load_plan


@torch.no_grad()
def load_pretrained(
    chunks: Sequence[GPTChunk], architecture: Architecture, path: str | Path, model_type: str
) -> None:
    """Fill `chunks` from `path`; rows that fill up the vocabulary become zero. All ranks, in `initialize`.

    A value model that is loaded from a language model gets a new head, the same on every rank and at every layout.
    Raises `ModelError`, on all ranks, for weights that are missing, unexpected or of another shape, and
    `CheckpointError` for a checkpoint that is damaged.
    """
    reader = open_weights(path)
    try:
        plan = load_plan(reader, architecture, model_type)
        if model_type == "value_model" and SCORE not in plan:
            plan[SCORE] = new_head(architecture)
        pieces = find_pieces(chunks, architecture)
        for piece in pieces:
            piece.view.copy_(plan[piece.name].read(piece.offset, piece.view.shape))
        for rows in padding(chunks, pieces):
            rows.zero_()
    finally:
        reader.close()


def new_head(architecture: Architecture) -> WeightSource:
    """The head `[1, H]` of a value model that has never been trained: normal, from the seed of rank 0. All ranks."""
    shape = (1, architecture.hidden_size)
    generator = torch.Generator().manual_seed(Peers.of().broadcast(torch.initial_seed()))
    head = torch.empty(shape).normal_(0.0, architecture.initializer_range, generator=generator)
    return WeightSource(shape, lambda offset, size: head)
