"""A live Megatron engine on one rank of a world: its chunks, its gradients, and Megatron's process-wide state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engines
from engines.contract import ExportPlan, hookimpl
from support.engine import opened
from support.megatron import settings


class Chunks:
    """A wrapper that keeps the chunks that run, in order of depth, and notes every forward."""

    def __init__(self) -> None:
        self.by_index: dict[int, Any] = {}
        self.forwards: list[tuple[int, int]] = []
        """(chunk, micro-batch)"""

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Any, chunk_index: int, index: int) -> Iterator[None]:
        self.by_index[chunk_index] = chunk
        self.forwards.append((chunk_index, index))
        return (yield)

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """All of this rank's, by chunk and name."""
        for index, chunk in sorted(self.by_index.items()):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter


def megatron(
    folder: Path, layout: str, engine: dict[str, Any] | None = None, **more: Any
) -> AbstractContextManager[engines.Engine]:
    """An initialised engine at a layout of `support.megatron`; `engine`: further settings; `more`: see `opened`."""
    return opened(folder, settings(layout, **(engine or {})), **more)


def gradients(engine: engines.Engine, chunks: Chunks) -> dict[str, Tensor]:
    """Full gradients by Hugging Face name, without a distributed optimizer; all ranks call it.

    They take the way of weights: exported in the weights' place.
    """
    held = {parameter: parameter.data for _, parameter in chunks.parameters()}
    for parameter in held:
        parameter.data = parameter.main_grad
    try:
        stream, _ = engine.get_per_tensor_param(ExportPlan(dtype=torch.float32))
        return {name: tensor.clone() for name, tensor in stream}
    finally:
        for parameter, weight in held.items():
            parameter.data = weight


def masters(engine: engines.Engine) -> dict[str, Tensor]:
    """float32 parameters by Hugging Face name, of a rank that holds them whole."""
    whole: dict[str, Tensor] = {}
    for shard in engine._base.shards(frozenset({"model"})):
        name = shard.key.removeprefix("model.")
        tensor = whole.setdefault(name, torch.full(shard.global_shape, torch.nan))
        assert shard.tensor.dtype == torch.float32
        spans = zip(shard.offset, shard.tensor.shape, strict=True)
        tensor[tuple(slice(start, start + size) for start, size in spans)] = shard.tensor
    return whole


def process_wide() -> dict[str, Any]:
    """What Megatron keeps outside of any engine, in a form that can be compared."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    tracker, scale = get_cuda_rng_tracker(), MoEAuxLossAutoScaler.main_loss_backward_scale
    return {
        **{name: repr(value) for name, value in vars(parallel_state).items() if name.isupper()},
        "random states": sorted(tracker.get_states()),
        "random seeds": sorted(tracker.seeds_),
        "auxiliary scale": None if scale is None else float(scale),
        "cached rotary embeddings": RotaryEmbedding.forward.cache_info().currsize,
    }
