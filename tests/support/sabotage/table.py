"""Which sabotage is caught by which clause, and how the engines are registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.config import EngineConfig
from engines.registry import registry
from engines.testing.reference import REFERENCE
from engines.testing.reference.config import ReferenceConfig
from support.sabotage import sharded, single


class ForgetsCapability(ReferenceConfig):
    """Declares a setting anew, and with it forgets which capability it needs."""

    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""


@dataclass(frozen=True)
class Sabotage:
    """A way to break the contract."""

    engine: type
    caught_by: str
    """The clause that is named for it."""
    often: bool = False
    """Whether `make test-more` runs it; all are run by `make test-sabotage`."""
    config: type[EngineConfig] = ReferenceConfig

    @property
    def name(self) -> str:
        """The backend under which it is registered."""
        own = self.config if self.config is not ReferenceConfig else self.engine
        return own.__name__


class LenientReference(single.ReferenceEngine):
    """The reference itself, with settings that are not."""


SABOTAGES = (
    Sabotage(single.NormalisesPerMicroBatch, "test_micro_batches_change_no_number", often=True),
    Sabotage(single.LeaksGraph, "test_graphs_die_with_their_micro_batch"),
    Sabotage(single.DrawsInInference, "test_inference_leaves_no_trace"),
    Sabotage(single.ForgetsRandomState, "test_a_resumed_run_is_equal_to_the_bit"),
    Sabotage(single.ReversesMicroBatches, "test_outputs_are_aligned_and_in_order"),
    Sabotage(single.IgnoresClipping, "test_optimizer_settings_are_obeyed"),
    Sabotage(single.IgnoresWarmup, "test_schedules_are_obeyed"),
    Sabotage(single.KeepsTrainMode, "test_modes_nest_and_are_restored"),
    Sabotage(single.ExportsTiedHead, "test_what_was_loaded_is_exported_to_the_bit"),
    Sabotage(single.ExportsAtOnce, "test_the_stream_is_lazy"),
    Sabotage(single.IgnoresPlan, "test_a_plan_decides_the_dtype"),
    Sabotage(single.MutatesBatch, "test_batches_are_not_changed"),
    Sabotage(single.OffByOne, "test_outputs_are_aligned_and_in_order", often=True),
    Sabotage(single.WrongEntropy, "test_entropy_is_that_of_the_distribution_of_each_token"),
    Sabotage(single.SwallowsExceptions, "test_exceptions_reach_the_caller_and_leave_nothing"),
    Sabotage(single.LeavesWrapper, "test_no_wrapper_is_left"),
    Sabotage(single.CountsSkippedSteps, "test_a_skipped_step_changes_nothing"),
    Sabotage(single.ForgetsOptimizer, "test_a_resumed_run_is_equal_to_the_bit"),
    Sabotage(single.SavesHalf, "test_a_resumed_run_is_equal_to_the_bit"),
    Sabotage(single.NeverMoves, "test_moving_changes_no_number"),
    Sabotage(single.LeavesDefaultType, "test_the_process_is_left_as_it_was"),
    Sabotage(single.Grows, "test_memory_does_not_grow"),
    Sabotage(single.AnswersFromCache, "test_inference_answers_for_the_newest_weights"),
    Sabotage(LenientReference, "test_what_is_not_declared_is_refused", config=ForgetsCapability),
    Sabotage(sharded.DoublesGradients, "test_training_equals_plain_pytorch", often=False),
    Sabotage(sharded.AveragesGradients, "test_training_equals_plain_pytorch"),
    Sabotage(sharded.TwoOutputRanks, "test_one_output_rank_per_replica"),
    Sabotage(sharded.IgnoresLayout, "test_what_is_built_is_what_was_asked_for"),
    Sabotage(sharded.SkipsAlone, "test_a_skipped_step_changes_nothing"),
    Sabotage(sharded.LeavesGroups, "test_closing_at_any_point_leaves_nothing"),
)

SOUND = "ShardedReference"
"""The backend of the engine of several processes that is not sabotaged."""


def register() -> None:
    """Register every engine of this folder, in the process that calls it."""
    if any(one.backend == SOUND for one in registry.candidates()):
        return
    _register(SOUND, sharded.ShardedReference, ReferenceConfig)
    for one in SABOTAGES:
        _register(one.name, one.engine, one.config)


def _register(name: str, engine: type, config: type[EngineConfig]) -> None:
    fields: dict[str, Any] = {**REFERENCE, "backend": name, "engine": engine, "config": config, "id": name}
    fields["model_type"] = "language_model"
    if issubclass(engine, sharded.ShardedReference):
        able = (*REFERENCE["capabilities"], "data_parallel", "context_parallel")
        fields["capabilities"] = tuple(word for word in able if word != "offload")
    registry.register(**fields)
