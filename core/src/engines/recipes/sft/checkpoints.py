"""The checkpoints that a run leaves, and what becomes of the run when one can't be written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from engines.agreement import Peers
from engines.errors import CheckpointError
from engines.launch import Rank
from engines.recipes.sft.config import TrainerConfig
from engines.recipes.sft.onward import onward
from engines.recipes.sft.writer import Writer
from engines.worker import TrainingWorker

_WORTH_SAYING_S: Final = 0.1


class Checkpoints:
    """One at a time, each of a step that is done. Every rank calls every method, after the same steps.

    What fails on one rank fails on all; `trainer.on_save_error` says whether it ends the run.
    """

    def __init__(self, trainer: TrainerConfig, worker: TrainingWorker, writer: Writer, rank: Rank, step: int) -> None:
        """`step`: that of the checkpoint which the run goes on from, 0 without one."""
        self._trainer, self._worker, self._writer, self._rank = trainer, worker, writer, rank
        self._begun = step
        self._error = CheckpointError("")
        self.saved = step
        """Step of the last one that is complete; 0: there is none."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save `step`, once; lines of metrics are on the disk before its checkpoint appears."""
        if self._begun == step:
            return
        self._await_earlier(step)
        self._rank.at(f"saving after step {step}")
        if self._attempt(lambda: self._begin(step, state)):
            self._begun = step
            self.settle()

    def settle(self) -> None:
        """Note that the last one is complete, once it is."""
        if self.saved != self._begun and self._worker.engine.saving is None:
            self.saved = self._begun
            self._attempt(self._retain)

    def finish(self) -> None:
        """Wait for the last one, if it is still being written."""
        if (saving := self._worker.engine.saving) is not None:
            self._rank.at(f"waiting for {saving} to be written")
            self._attempt(self._worker.engine.finish_saving)
        self.settle()

    def failed(self, error: CheckpointError) -> None:
        """One could not be written, or an earlier one not be deleted: raise it, or say so and go on."""
        self._error, self._begun = error, self.saved
        if self._trainer.on_save_error == "stop":
            raise CheckpointError(error.message, self._remedy()) from error
        self._writer.note(f"{error.message}; the run goes on (trainer.on_save_error)")

    def check(self, step: int) -> None:
        """At the end of a run: raise what left `step` without a checkpoint, if something did."""
        if self.saved != step:
            raise CheckpointError(self._error.message, self._remedy()) from self._error

    def _begin(self, step: int, state: dict[str, Any]) -> None:
        path = self._writer.folder.checkpoint(step)
        with Peers.of().all_or_none(f"cannot save {path}", error=CheckpointError):
            self._writer.sync()
        self._worker.save_checkpoint(
            path,
            step=step,
            state=state,
            contents=self._trainer.checkpoint_contents,
            background=self._trainer.async_save,
        )

    def _await_earlier(self, step: int) -> None:
        """There are never two at once, so that the fault of one is never taken for that of the other."""
        earlier, began = self._worker.engine.saving, time.monotonic()
        self.finish()
        waited = time.monotonic() - began
        if earlier is not None and waited > _WORTH_SAYING_S:
            self._writer.note(f"step {step} waited {waited:.1f} s until {earlier} was written")

    def _retain(self) -> None:
        with Peers.of().all_or_none("cannot delete earlier checkpoints", error=CheckpointError):
            self._writer.retain(self._trainer.keep)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether it succeeded."""
        try:
            action()
        except CheckpointError as error:
            self.failed(error)
            return False
        return True

    def _remedy(self) -> str:
        kept, command = onward(self._writer.folder, self._trainer)
        return f"{kept[0].upper()}{kept[1:]}. Mend it, and {command}."
