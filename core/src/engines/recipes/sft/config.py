"""The keys of `recipe: sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from engines.checkpoint_folder.manifest import RESUMABLE, Content, unfit
from engines.config import Config, EngineConfig, LocalPath, ModelConfig, OptimizerConfig, Positive

Logger = Literal["tensorboard", "wandb"]


class DataConfig(Config):
    """What to learn from. Formats: see `engines.recipes.data`."""

    train: LocalPath
    """JSONL (.jsonl) or Parquet (.parquet) file to learn from."""
    eval: LocalPath | None = None
    """File of the same formats whose loss is measured, every trainer.eval_every steps and at the end."""
    max_length: Positive | None = None
    """Longest sample, in tokens."""
    overlong: Literal["error", "truncate"] = "error"
    """What to do with samples longer than max_length: refuse them, or cut off their end."""

    @model_validator(mode="after")
    def _truncate_to_something(self) -> DataConfig:
        if self.overlong == "truncate" and self.max_length is None:
            raise ValueError("overlong=truncate needs max_length, the length to cut to")
        return self


class TrainerConfig(Config):
    """How long to train, and what to write where."""

    mini_batch_size: Positive
    """Samples of one optimizer step, over all ranks."""
    output_dir: LocalPath
    """Folder of metrics.jsonl, run.json, recipe.yaml, loss.png, checkpoints/ and export/."""
    steps: Positive | None = None
    """Optimizer steps; instead of epochs."""
    epochs: Positive | None = None
    """Passes over data.train; instead of steps. The last step is filled up from the pass after."""
    shuffle: bool = True
    """Draw a new order of samples for each epoch; false: in file order."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of samples and of the model's dropout."""
    deterministic: bool = False
    """Use deterministic kernels only, so that equal runs are equal to the bit on accelerators too."""
    save_every: Positive | None = None
    """Save a checkpoint every so many steps; null: only at the end."""
    keep: Positive | None = None
    """Keep this many of the newest checkpoints; null: all."""
    async_save: bool = False
    """Let training go on while a checkpoint is written; takes host memory for a copy of all that a rank saves."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint can't be written (disk full, folder gone): stop the run, or say so and train on.
    Without its last one a run fails in either case, in the latter after the export."""
    checkpoint_contents: tuple[Content, ...] = RESUMABLE
    """What checkpoints hold: model, optimizer, state (schedule, data position, random state) and huggingface, a copy
    as export/ has it. A run goes on only from the first three together."""
    save_on_exit: bool = True
    """Save a checkpoint when stopped by Ctrl-C or SIGTERM."""
    resume: LocalPath = "auto"
    """auto: go on from the newest checkpoint in output_dir, if any; never: start afresh, in a folder without a
    run; otherwise the path of a checkpoint."""
    eval_every: Positive | None = None
    """Measure the loss on data.eval every so many steps; null: only at the end."""
    export: bool = True
    """Write the model as a Hugging Face folder, export/, at the end."""
    max_skipped: Positive = 10
    """Stop after this many steps in a row whose gradients were not finite."""
    loggers: tuple[Logger, ...] = ()
    """Also log to these."""
    trace: bool = False
    """Write a Chrome trace of steps and micro-batches, one file a rank, to output_dir/trace/."""

    @field_validator("checkpoint_contents")
    @classmethod
    def _of_use(cls, contents: tuple[Content, ...]) -> tuple[Content, ...]:
        if fault := unfit(contents):
            raise ValueError(fault)
        return contents

    @model_validator(mode="after")
    def _one_length(self) -> TrainerConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say how long to train; set one of them")
        if self.steps is None and self.epochs is None:
            raise ValueError("steps or epochs must say how long to train")
        return self


class LaunchConfig(Config):
    """Processes. Under torchrun it decides on their number, and nproc is not used."""

    nproc: Annotated[int, Field(ge=1, le=4096)] = 1
    """Processes to start on this machine; one per device on accelerators."""
    timeout_s: Annotated[float, Field(ge=1, le=10**8, allow_inf_nan=False)] = 600
    """A rank that others have waited for so long, in seconds, ends the run."""


class SFTRecipe(Config):
    """Supervised fine-tuning of a language model."""

    recipe: Literal["sft"]
    """Which training loop this is a recipe for."""
    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig
    engine: SerializeAsAny[EngineConfig] = EngineConfig()
    """Validated by the chosen engine's own class; `engines schema ENGINE` shows all of its keys."""
    optimizer: OptimizerConfig = OptimizerConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _evaluate_on_something(self) -> SFTRecipe:
        if self.trainer.eval_every is not None and self.data.eval is None:
            raise ValueError("trainer.eval_every needs data.eval, the file to measure the loss on")
        return self
