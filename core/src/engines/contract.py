"""The contract between core and a training backend.

An engine's author subclasses `BaseEngine`; the methods below are its hookspecs, called by core through one
pluggy plugin manager per engine. Getters are plain data (`ranks`); contexts, nesting, offload and the handling
of exceptions belong to core's `engines.engine.Engine`, which is what users hold.

Rules that core enforces when an engine is bound (`engines.engine.binding`): every hook is present with exactly
these parameters, without defaults and not keyword-only; no other public method exists. A hook marked
`@behaviour(capability=...)` is required only of engines whose manifest declares that capability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from engines.batch import Batch, TokenOutputs
    from engines.config import EngineConfig, ModelConfig, OptimizerConfig

API = 1
"""The version of this contract; `engine.toml` states the one that it was written for."""

PROJECT = "engines"
"""The pluggy project name of hookspecs and hookimpls."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a hook of a *wrapper* (`@hookimpl(wrapper=True)`); engines themselves need no marker."""

Mode = Literal["train", "eval"]
Part = Literal["model", "optimizer", "grads"]
Skip = Literal["empty", "non_finite"]

F = TypeVar("F", bound=Callable[..., Any])


def behaviour(*, capability: str | None = None) -> Callable[[F], F]:
    """Mark a method of `BaseEngine` as a hook; with `capability`, one that only engines declaring it must have."""

    def mark(function: F) -> F:
        function.__engines_capability__ = capability  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Ranks:
    """Where this process stands in its engine; readable right after construction, before `initialize`.

    One mesh yields the data-parallel three: ranks that see *different* samples, without tp, pp, cp and ulysses.
    The other ranks of a replica work on the same samples; exactly one of them per replica is its output rank.
    """

    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup | None
    """Ranks with my position in their replica; None where the engine runs in one process."""
    replica_group: ProcessGroup | None
    """Ranks of my replica; None where a replica is one process."""
    output_rank: int
    """Global rank of my replica's output rank."""
    is_output: bool


@dataclass(frozen=True)
class MicroBatchRules:
    """What an engine's schedule accepts; the planner obeys, so that no schedule ever sees what it can't run."""

    at_least: int = 1
    """Fewest micro-batches of a step (1F1B: the number of stages)."""
    multiple_of: int = 1
    """The count must be a multiple of this (interleaved schedules)."""
    equal_rows: bool = False
    """All micro-batches of a step must have equal rows; the engine pads its own inputs and unpads its outputs."""
    rows: Callable[[Sequence[int]], int] = sum
    """Rows that a micro-batch of sequences with these lengths takes on a rank (context parallelism pads)."""


@dataclass(frozen=True)
class MicroResult:
    """What is left of one micro-batch on a rank that holds outputs: detached, small."""

    terms: Mapping[str, Tensor]
    """Loss terms of `BoundLoss`, each a 0-d float64 sum on the CPU; empty without a loss."""
    outputs: TokenOutputs | None = None
    """Per-token outputs in packed order, detached; only when asked for (see `forward_backward_batch`)."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Engine metrics of the micro-batch (auxiliary losses, tokens per expert), averaged over micro-batches."""


@dataclass(frozen=True)
class StepResult:
    """What `BaseEngine.step` did; equal on all ranks, but for `not_finite`."""

    grad_norm: float
    """L2 norm over all parameters, each once, before clipping."""
    lr: float
    """The rate that the step used (that it would have used, if skipped)."""
    skipped: Skip | None = None
    not_finite: tuple[str, ...] = ()
    """Of a step skipped as "non_finite": the parameters of this rank whose gradients weren't finite, in the model's
    order and by their Hugging Face names; empty where an engine can't tell. Core puts those of all ranks together."""


class BoundLoss(Protocol):
    """A loss whose denominators are fixed for the step; an engine calls it where it holds the outputs."""

    needs: frozenset[str]
    """Which of `TokenOutputs`' fields the loss reads."""
    targets_only: bool
    """Whether outputs are read only where `loss_mask` is set; an engine may leave 0 elsewhere."""
    equal_weights: bool
    """Whether every target's log-probability counts alike, as `Loss.equal_weights` says."""

    def __call__(self, outputs: TokenOutputs, micro_batch: Batch) -> tuple[Tensor, MicroResult]:
        """Return the 0-d tensor to differentiate and the record to keep.

        `outputs` are in packed order, for whole sequences; `micro_batch` is on their device.

        The gradient of a parameter must become the plain sum of d(tensor) over all micro-batches, data-parallel
        ranks and token shards: an engine whose backend averages must undo that. For a filler micro-batch the
        tensor is zero, but attached to the outputs, so that every rank's backward meets its collectives.
        """
        ...


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a tensor, for a checkpoint.

    `tensor` is the contiguous block at `offset` of a tensor with `global_shape`, on any device. Pieces that
    several ranks hold alike carry `replica` 0 on exactly one of them; only that one is written.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    replica: int = 0


class ShardReader(Protocol):
    """A checkpoint's tensors, sliced on demand; made by core, whatever layout wrote them."""

    def keys(self) -> frozenset[str]:
        """Every key of the part that is being loaded."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor. Raises `CheckpointError` naming the key and the closest ones if unknown."""
        ...

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block at `offset` with `shape`, on the CPU, in the dtype that was saved; to be copied from."""
        ...

    def read_into(self, key: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill `target`, on any device and of any dtype, with the block at `offset` of its shape.

        The faster way for what is kept: whole rows are read straight into memory of the CPU.
        """
        ...


@dataclass(frozen=True)
class ExportPlan:
    """How weights leave an engine."""

    dtype: torch.dtype | None = None
    """Cast floating-point tensors to this; None: `ModelConfig.dtype`."""
    adapters: Literal["merged", "only"] = "merged"
    """Merge adapters into the base while streaming, or send adapters alone (needs capability `lora`)."""


@dataclass(frozen=True)
class EngineContext:
    """All that core tells an engine, given to its constructor."""

    model_type: str
    model: ModelConfig
    config: EngineConfig
    """An instance of the config class that the plugin's manifest names."""
    optimizer: OptimizerConfig | None
    """None: the engine only infers; it must hold no optimizer state."""
    total_steps: int | None
    """Length of the run in optimizer steps; schedules that decay end there."""
    device: torch.device
    """This process's device, with its index."""
    capabilities: frozenset[str]
    """What the manifest declares for this engine."""
    hook: Any
    """pluggy's callers; an engine runs each micro-batch through `hook.forward_micro_batch(...)`, by keyword."""


class BaseEngine:
    """What an engine's author subclasses.

    Life cycle: `__init__(ctx)` makes process groups and sets `ranks`, nothing heavy; `initialize` builds and
    loads; then any number of steps; `close` frees groups and memory, also after a failed `initialize`. Unless
    said otherwise every rank of the engine calls every hook, in the same order.
    """

    ranks: Ranks
    lr: float
    """The rate that the next step will use; readable after `initialize` (engines with an optimizer)."""

    def __init__(self, ctx: EngineContext) -> None:
        """Make process groups and set `self.ranks`. All ranks."""
        self.ctx = ctx

    @behaviour()
    def initialize(self) -> None:
        """Build the model on `ctx.device`, load weights from `ctx.model.path`, make the optimizer."""
        raise NotImplementedError

    @behaviour()
    def set_mode(self, mode: Mode) -> None:
        """Switch to "train" (dropout on) or "eval" (dropout off). Core keeps the nesting and restores."""
        raise NotImplementedError

    @behaviour(capability="offload")
    def move(self, device: str, parts: frozenset[Part]) -> None:
        """Move the named parts to `device` ("cpu" or the engine's own device)."""
        raise NotImplementedError

    @behaviour(capability="lora")
    def set_adapter_enabled(self, enabled: bool) -> None:
        """Switch adapters on or off (off: the base model answers)."""
        raise NotImplementedError

    @behaviour()
    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        """What the schedule accepts. Called before each batch; cheap."""
        raise NotImplementedError

    @behaviour()
    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        raise NotImplementedError

    @behaviour()
    def forward_backward_batch(
        self,
        micro_batches: Sequence[Batch],
        loss: BoundLoss | None,
        needs: frozenset[str],
        forward_only: bool,
    ) -> list[MicroResult] | None:
        """Run all micro-batches through the engine's schedule, accumulating gradients unless `forward_only`.

        `micro_batches`: this replica's, on the CPU, equally many on every data-parallel rank, fillers included.
        `needs`: outputs to return in `MicroResult.outputs`, whatever the loss reads; empty: keep none.
        Returns one result per micro-batch, in their order, on every rank that holds outputs; None elsewhere.
        """
        raise NotImplementedError

    @behaviour()
    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> Any:
        """The forward of one micro-batch through one model chunk; what it returns is the engine's own affair.

        Called by the engine itself through `ctx.hook`, inside its schedule, once per chunk and micro-batch:
        the seam on which tracing, replay and fault injection stand.
        """
        raise NotImplementedError

    @behaviour()
    def step(self) -> StepResult:
        """Measure the gradient norm, clip, and step the optimizer; with a non-finite norm skip, on all ranks."""
        raise NotImplementedError

    @behaviour()
    def schedule_step(self) -> float:
        """Advance the learning-rate schedule by one; return the rate that the next step will use."""
        raise NotImplementedError

    @behaviour()
    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor), lazily, one bucket of extra memory.

        Every rank must drain it, in the same order; names and shapes are those that `save_pretrained` of the
        model writes: a tied head is left out, experts come one by one.
        """
        raise NotImplementedError

    @behaviour()
    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        """Yield this rank's shards of "model" and "optimizer" (keys are prefixed `model.` and `optimizer.`)."""
        raise NotImplementedError

    @behaviour()
    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        """Fill this rank's shards of the named parts from `reader`."""
        raise NotImplementedError

    @behaviour()
    def extra_state(self) -> dict[str, Any]:
        """Small state beside the shards, equal on all ranks: JSON values only (the schedule's position, ...)."""
        raise NotImplementedError

    @behaviour()
    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned, at any layout."""
        raise NotImplementedError

    @behaviour()
    def describe(self) -> dict[str, Any]:
        """What was *built*, read from live groups and model, not from the config.

        Keys: `layout` (every parallel size under its config name) and `parameters` (number of parameter
        elements that this rank holds).
        """
        raise NotImplementedError

    @behaviour()
    def close(self) -> None:
        """Free process groups and memory. Called once, also after a failed `initialize`; must not need it."""
        raise NotImplementedError
