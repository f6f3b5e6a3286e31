"""Megatron's parallel state: process-wide, so engines of equal layout share it by reference count."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.contract import Ranks
from engines.errors import ConfigError, LaunchError
from engines_megatron.layout import Layout

Sizes = tuple[int, ...]
"""What of a layout the parallel state holds."""


@dataclass
class _Held:
    """The state that this process holds."""

    sizes: Sizes
    groups: tuple[ProcessGroup, ...]
    """Every group that was made for it, in that order."""
    replica_group: ProcessGroup | None
    before: _Before
    engines: int = 0


@dataclass(frozen=True)
class _Before:
    """Megatron's process-wide variables as they were before any engine."""

    parallel_state: dict[str, Any]
    auxiliary_scale: Tensor | None
    """Set by Megatron's schedules; this engine's routers don't read it, others' may."""

    @classmethod
    def now(cls) -> _Before:
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        names = {name: value for name, value in vars(parallel_state).items() if name.isupper()}
        return cls(names, None if scale is None else scale.clone())

    def restore(self) -> None:
        # of itself, Megatron forgets to forget some of its groups
        parallel_state.destroy_model_parallel()
        vars(parallel_state).update(self.parallel_state)
        parallel_random.get_cuda_rng_tracker().reset()
        MoEAuxLossAutoScaler.main_loss_backward_scale = self.auxiliary_scale


_held: list[_Held] = []
"""One at most."""


def acquire(layout: Layout) -> Ranks:
    """Make Megatron's groups for `layout`, or share those of a living engine; returns where this process stands.

    All ranks call it, and `release` once for each call. Raises `LaunchError` without a default process group or
    where other code has initialised Megatron's parallel state, `ConfigError` beside an engine of another layout.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "megatron needs torch.distributed, also for one process",
            "make the engine through TrainingWorker, or call torch.distributed.init_process_group first",
        )
    sizes = _sizes(layout)
    if not _held:
        _held.append(_create(layout, sizes))
    (held,) = _held
    if held.sizes != sizes:
        raise ConfigError(
            f"a megatron engine of the layout {_said(held.sizes)} lives in this process, where one of "
            f"{_said(sizes)} is asked for: Megatron-Core holds one layout in a process",
            "close the first one, give both the same layout, or place them in separate processes",
        )
    held.engines += 1
    return _ranks(layout, held.replica_group)


def release() -> None:
    """Give up one engine's share; the last one destroys the groups and the random states."""
    assert _held, "released more often than acquired"
    (held,) = _held
    held.engines -= 1
    RotaryEmbedding.forward.cache_clear()  # it is a cache on a method, and keeps modules of closed engines
    if held.engines == 0:
        _held.clear()
        held.before.restore()
        _destroy(held.groups)


def world_size() -> int:
    """Ranks of the run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def live_sizes() -> dict[str, int]:
    """Every parallel size by its name in a recipe, read from the groups."""
    return {
        "data_parallel_size": parallel_state.get_data_parallel_world_size(with_context_parallel=False),
        "data_parallel_replicate_size": 1,
        "tensor_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _create(layout: Layout, sizes: Sizes) -> _Held:
    if parallel_state.model_parallel_is_initialized():
        raise LaunchError(
            "Megatron-Core's parallel state is initialised in this process, but not by an engine",
            "call megatron.core.parallel_state.destroy_model_parallel() first, or use a process of its own",
        )
    known, before = _groups_beside(()), _Before.now()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        replica_group = _make_replica_group(layout)
        _seed_random_states()
    except BaseException:
        before.restore()
        _destroy(_groups_beside(known))
        raise
    return _Held(sizes, _groups_beside(known), replica_group, before)


def _groups_beside(known: Collection[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    """The others that live in this process, in the order in which all ranks made them."""
    return tuple(group for group in dist.distributed_c10d._world.pg_map if group not in known)


def _destroy(groups: tuple[ProcessGroup, ...]) -> None:
    for group in groups:
        if group in _groups_beside(()):  # none is left where the default group is gone
            dist.destroy_process_group(group)


def _make_replica_group(layout: Layout) -> ProcessGroup | None:
    """Ranks that work on the same samples; Megatron's own model-parallel group leaves context parallelism out.

    Ranks are numbered tensor first, then context, data, pipeline (Megatron's default order).
    """
    if layout.tensor * layout.context * layout.pipeline == 1:
        return None
    ranks = torch.arange(dist.get_world_size()).view(layout.pipeline, layout.data, layout.context * layout.tensor)
    mine = None
    for replica in ranks.transpose(0, 1).flatten(1).tolist():
        group = dist.new_group(replica)
        if dist.get_rank() in replica:
            mine = group
    return mine


def _seed_random_states() -> None:
    """Megatron forks these around what differs over tensor-parallel ranks; this engine draws nothing from them."""
    tracker = parallel_random.get_cuda_rng_tracker()
    tracker.reset()
    seed = torch.initial_seed() % 2**32
    for number, name in enumerate(
        (
            parallel_random._MODEL_PARALLEL_RNG_TRACKER_NAME,
            parallel_random.get_expert_parallel_rng_tracker_name(),
            parallel_random.get_data_parallel_rng_tracker_name(),
        )
    ):
        tracker.add(name, seed + 1024 * (number + 1) + parallel_state.get_tensor_model_parallel_rank())


def _ranks(layout: Layout, replica_group: ProcessGroup | None) -> Ranks:
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=False)
    last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    stage_size = layout.tensor * layout.context * layout.data
    return Ranks(
        dp_rank=dp_rank,
        dp_size=layout.data,
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=False) if layout.data > 1 else None,
        replica_group=replica_group,
        output_rank=(layout.pipeline - 1) * stage_size + dp_rank * layout.tensor * layout.context,
        is_output=last_stage and first,
    )


def _sizes(layout: Layout) -> Sizes:
    return (
        layout.tensor,
        layout.pipeline,
        layout.virtual_pipeline,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.data,
    )


def _said(sizes: Sizes) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
