"""Which sabotage is caught by which clause, and how the engines are registered. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.registry import registry
from engines.testing.reference import REFERENCE

ROOM = "support.sabotage"
DP, CP = "data_parallel", "context_parallel"


@dataclass(frozen=True)
class Sabotage:
    """A way to break the contract."""

    where: str
    """What does it, module:Class of this folder: an engine, or the config of one that is sound."""
    caught_by: str
    """The clause that is named for it, less `test_`."""
    often: bool = False
    """Whether `make test-more` runs it, and not `make test-sabotage`."""
    declares: tuple[str, ...] = ()
    """Capabilities beside the reference's."""
    has_values: bool = False
    """Whether it is a value model too."""

    @property
    def name(self) -> str:
        """The backend under which it is registered."""
        return self.where.partition(":")[2]


SOUND = Sabotage("sharded:ShardedReference", "nothing", declares=(DP, CP))
"""An engine of several processes that breaks nothing."""

SABOTAGES = (
    # numbers
    Sabotage("steps:NormalisesPerMicroBatch", "micro_batches_change_no_number", often=True),
    Sabotage("steps:IgnoresClipping", "optimizer_settings_are_obeyed", often=True),
    Sabotage("steps:IgnoresDecay", "optimizer_settings_are_obeyed"),
    Sabotage("steps:TakesWeightsForEqual", "training_sees_what_inference_reported"),
    Sabotage("steps:IgnoresWarmup", "schedules_are_obeyed"),
    Sabotage("steps:CountsSkippedSteps", "a_skipped_step_changes_nothing"),
    Sabotage("steps:EvaluatesOtherwise", "metrics_are_one_value_equal_on_all_ranks"),
    Sabotage("ranks:DoublesGradients", "training_equals_plain_pytorch", often=True, declares=(CP,)),
    Sabotage("ranks:AveragesGradients", "training_equals_plain_pytorch", declares=(DP,)),
    Sabotage("ranks:MakesUpForReplicas", "replicas_without_targets_take_part", declares=(DP,)),
    Sabotage("ranks:SkipsAlone", "a_skipped_step_changes_nothing", declares=(DP,)),
    # outputs
    Sabotage("outputs:OffByOne", "outputs_are_aligned_and_in_order", often=True),
    Sabotage("outputs:SortsSequences", "outputs_are_aligned_and_in_order", often=True),
    Sabotage("outputs:TellsEntropyInBits", "entropy_is_that_of_the_distribution_of_each_token"),
    Sabotage("outputs:TellsValuesLate", "a_value_model_trains_like_a_backbone_with_a_head", has_values=True),
    Sabotage("outputs:AnswersFromCache", "inference_answers_for_the_newest_weights"),
    Sabotage("outputs:SkipsFillers", "no_sequence_at_all"),
    Sabotage("outputs:GuessesLoneTokens", "sequences_of_one_token"),
    Sabotage("outputs:UnderstatesRows", "a_sequence_longer_than_the_budget"),
    # hooks and modes
    Sabotage("hooks:KeepsTrainMode", "modes_nest_and_are_restored", often=True),
    Sabotage("hooks:SwitchesTheTop", "modes_reach_every_module_that_runs"),
    Sabotage("hooks:DrawsInInference", "inference_leaves_no_trace"),
    Sabotage("hooks:DropsGradientsInInference", "inference_leaves_no_trace"),
    Sabotage("hooks:MutatesBatch", "batches_are_not_changed", often=True),
    Sabotage("hooks:BypassesHook", "forward_micro_batch_runs_once_per_chunk_and_micro_batch"),
    Sabotage("hooks:ReturnsGraphs", "results_are_one_per_micro_batch_and_detached"),
    Sabotage("hooks:LeavesWrapper", "no_wrapper_is_left", often=True),
    Sabotage("hooks:SwallowsExceptions", "exceptions_reach_the_caller_and_leave_nothing", often=True),
    # life and memory
    Sabotage("life:LeaksGraph", "graphs_die_with_their_micro_batch", often=True),
    Sabotage("life:Grows", "memory_does_not_grow"),
    Sabotage("life:KeepsItsModel", "closing_at_any_point_leaves_nothing"),
    Sabotage("life:SharesOptimizer", "two_engines_train_as_if_alone"),
    Sabotage("life:SharesHook", "a_wrapper_belongs_to_one_engine"),
    Sabotage("life:AlwaysHoldsGradients", "an_engine_without_optimizer_only_infers"),
    Sabotage("life:SetsEnvironment", "the_process_is_left_as_it_was"),
    Sabotage("ranks:LeavesGroups", "closing_at_any_point_leaves_nothing", declares=(DP,)),
    # weights and checkpoints
    Sabotage("weights:DropsTiedWeight", "what_was_loaded_is_exported_to_the_bit", often=True),
    Sabotage("weights:DropsUntiedHead", "every_model_is_exported_to_the_bit"),
    Sabotage("weights:ExportsTiedHead", "what_was_loaded_is_exported_to_the_bit"),
    Sabotage("weights:ExportsAtOnce", "the_stream_is_lazy"),
    Sabotage("weights:IgnoresPlan", "a_plan_decides_the_dtype"),
    Sabotage("weights:ForgetsMoment", "a_resumed_run_is_equal_to_the_bit"),
    Sabotage("weights:ForgetsRandomState", "a_resumed_run_is_equal_to_the_bit", often=True),
    Sabotage("weights:SavesStaleWeight", "a_checkpoint_is_a_model"),
    Sabotage("weights:KeepsMoments", "loading_replaces_all_state"),
    Sabotage("ranks:ForgetsMomentsElsewhere", "another_layout_goes_on", declares=(DP,)),
    Sabotage("weights:SavesTuples", "small_state_is_json_and_equal_on_all_ranks"),
    # what is built and declared
    Sabotage("ranks:TwoOutputRanks", "one_output_rank_per_replica", often=True, declares=(CP,)),
    Sabotage("ranks:IgnoresLayout", "what_is_built_is_what_was_asked_for", often=True, declares=(CP,)),
    Sabotage("ranks:BelievesItsConfig", "shares_of_samples", declares=(CP,)),
    Sabotage("weights:LosesGradientsOnTheWay", "moving_changes_no_number"),
    Sabotage(
        *("config:KeepsAllActivations", "recomputed_activations_change_no_number"),
        often=True,
        declares=("activation_checkpointing",),
    ),
    Sabotage("config:ForgetsCapability", "what_is_not_declared_is_refused"),
    Sabotage("config:TakesAnything", "an_unknown_setting_is_refused"),
    Sabotage("config:SaysNothing", "every_setting_is_described"),
    Sabotage("config:ImportsTorch", "settings_are_checked_without_torch"),
)


def register() -> None:
    """Register all of them for the rest of this process; once, however often it is called."""
    if not _is_registered():
        for one in (SOUND, *SABOTAGES):
            registry.register(**_fields(one))


def _is_registered() -> bool:
    return any(one.backend == SOUND.name for one in registry.candidates())


def _fields(one: Sabotage) -> dict[str, Any]:
    """What a manifest would say of it."""
    part = "config" if one.where.startswith("config:") else "engine"
    capabilities = {*REFERENCE["capabilities"], *one.declares}
    if one.where.startswith(("sharded:", "ranks:")):
        capabilities -= {"offload"}
    return {
        **REFERENCE,
        "backend": one.name,
        "model_type": ("language_model", "value_model") if one.has_values else "language_model",
        "capabilities": capabilities,
        "config": f"{ROOM}.config:OnlyLlama",
        part: f"{ROOM}.{one.where}",
    }
