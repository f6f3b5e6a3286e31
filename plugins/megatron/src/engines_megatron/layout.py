"""How a model is laid out over ranks: every size, checked before anything starts; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engines.errors import ConfigError
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
    """The layout that `config` asks for on `world_size` processes.

    Raises `ConfigError` for one that Megatron can't run, a line with reason and remedy for each fault.
    """
    faults = [
        *_tensor_faults(config, architecture),
        *_expert_faults(config, architecture),
        *_pipeline_faults(config, architecture),
        *_world_faults(config, architecture, world_size),
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    chunks = pipeline * config.virtual_pipeline_parallel_size
    return Layout(
        tensor=tensor,
        sequence_parallel=config.sequence_parallel,
        pipeline=pipeline,
        virtual_pipeline=config.virtual_pipeline_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
        data=world_size // (tensor * pipeline * config.context_parallel_size),
        chunk_layers=config.pipeline_layers or _evenly(architecture.num_layers, chunks),
        padded_vocab_size=-(-architecture.vocab_size // tensor) * tensor,
    )


def _evenly(layers: int, chunks: int) -> tuple[int, ...]:
    """As even as possible, later chunks fewer: the last one also has the head."""
    whole, rest = divmod(layers, chunks)
    return tuple(whole + (chunk < rest) for chunk in range(chunks))


def _tensor_faults(config: MegatronConfig, architecture: Architecture) -> Iterator[str]:
    size, experts = config.tensor_parallel_size, architecture.experts
    parts = {"attention heads": architecture.num_heads, "key-value heads": architecture.num_kv_heads}
    if experts is None or not all(experts.layers):
        parts["rows of an MLP (intermediate_size)"] = architecture.ffn_hidden_size
    yield from _undivided("tensor_parallel_size", size, parts)
    if config.sequence_parallel and size == 1:
        yield (
            "engine.sequence_parallel: true shards activations over the tensor-parallel ranks, and there is one. "
            "Use false, or a tensor_parallel_size above 1."
        )
    if experts is not None and size > 1 and not config.sequence_parallel:
        yield (
            "engine.sequence_parallel: false: under tensor parallelism Megatron trains mixtures of experts only with "
            "sequence parallelism. Use true, or engine.tensor_parallel_size=1."
        )


def _expert_faults(config: MegatronConfig, architecture: Architecture) -> Iterator[str]:
    experts = architecture.experts
    if experts is not None:
        yield from _undivided("expert_parallel_size", config.expert_parallel_size, {"experts": experts.number})
        rows = {"rows of an expert": experts.ffn_hidden_size}
        yield from _undivided("expert_tensor_parallel_size", config.expert_tensor_parallel_size, rows)
        return
    for name in ("expert_parallel_size", "expert_tensor_parallel_size", "moe_aux_loss_coefficient"):
        value, default = getattr(config, name), type(config).model_fields[name].default
        if value != default:
            yield (
                f"engine.{name}: {value} is about experts, and this {architecture.model_type} model has none. "
                f"Use {default}."
            )


def _undivided(name: str, size: int, parts: dict[str, int]) -> Iterator[str]:
    """What `size` ranks can't share equally, with the sizes that can."""
    undivided = [f"{number} {what}" for what, number in parts.items() if number % size]
    if undivided:
        most = math.gcd(*parts.values())
        divisors = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
        yield (
            f"engine.{name}: {size} doesn't divide the model's {' and '.join(undivided)}. "
            f"Sizes that work: {divisors}."
        )


def _pipeline_faults(config: MegatronConfig, architecture: Architecture) -> Iterator[str]:
    stages, per_stage = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    chunks, layers = stages * per_stage, architecture.num_layers
    each = f" of {per_stage} chunks each" if per_stage > 1 else ""
    if per_stage > 1 and stages == 1:
        yield (
            f"engine.virtual_pipeline_parallel_size: {per_stage} chunks of a stage take turns with those of other "
            "stages, and there is one stage. Use 1, or a pipeline_parallel_size above 1."
        )
    if chunks > layers:
        yield (
            f"engine.pipeline_parallel_size: {stages} stages{each} need {chunks} decoder layers at least, and the "
            f"model has {layers}. Use fewer{', or fewer chunks (virtual_pipeline_parallel_size)' if each else ''}."
        )
    given = config.pipeline_layers
    if given is not None and len(given) != chunks:
        yield (
            f"engine.pipeline_layers: {list(given)} has {len(given)} numbers, and {stages} stages{each} are {chunks} "
            "chunks. Give a number for each chunk in order of depth, or null."
        )
    if given is not None and sum(given) != layers:
        yield (
            f"engine.pipeline_layers: {list(given)} adds up to {sum(given)} decoder layers, and the model has "
            f"{layers}. Give each layer a chunk, or null."
        )


def _world_faults(config: MegatronConfig, architecture: Architecture, world_size: int) -> Iterator[str]:
    """The conditions of Megatron's `initialize_model_parallel`: two factorings of the same ranks."""
    products = [("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")]
    if architecture.experts is not None:
        products.append(("expert_tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size"))
    sizes = [math.prod(getattr(config, name) for name in names) for names in products]
    for names, size in zip(products, sizes, strict=True):
        if world_size % size:
            product = " * ".join(f"{name}={getattr(config, name)}" for name in names if getattr(config, name) > 1)
            yield (
                f"{world_size} process{'es' if world_size > 1 else ''} can't be divided into groups of {size} "
                f"({product}). Start a multiple of {math.lcm(*sizes)} (launch.nproc)."
            )
