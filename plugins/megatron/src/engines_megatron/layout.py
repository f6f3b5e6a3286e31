"""How a model is laid out over ranks: every size, checked before anything starts; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engines_megatron.architectures import Architecture
from engines_megatron.config import MegatronConfig


@dataclass(frozen=True)
class Layout:
    """Sizes of every parallel dimension, and what of the model each chunk holds."""

    tensor: int
    sequence_parallel: bool
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    """Replicas that see different samples: without context parallelism."""
    chunk_layers: tuple[int, ...]
    """Decoder layers of each chunk in order of depth; chunk i is chunk i // pipeline of stage i % pipeline."""
    padded_vocab_size: int
    """Rows of the embedding and the head over all tensor-parallel ranks."""


def plan_layout(config: MegatronConfig, architecture: Architecture, world_size: int) -> Layout:
    """The layout that `config` asks for. Raises `ConfigError` for one that Megatron can't run, with the remedy."""
    replica = config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    chunks = config.pipeline_parallel_size * config.virtual_pipeline_parallel_size
    whole, rest = divmod(architecture.num_layers, chunks)
    even = tuple(whole + (chunk < rest) for chunk in range(chunks))
    return Layout(
        tensor=config.tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        pipeline=config.pipeline_parallel_size,
        virtual_pipeline=config.virtual_pipeline_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
        data=world_size // replica,
        chunk_layers=config.pipeline_layers or even,
        padded_vocab_size=-(-architecture.vocab_size // config.tensor_parallel_size) * config.tensor_parallel_size,
    )
