"""The loop over steps, the same on every rank."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from engines.batch import Batch
from engines.device_services import DeviceServices
from engines.errors import CheckpointError, ModelError
from engines.launch import Rank, RunFailed
from engines.launch.stopping import exit_code
from engines.losses import SFTLoss
from engines.recipes.data import SampleOrder, Samples
from engines.recipes.output.starting import Start
from engines.recipes.sft.checkpoints import Checkpoints
from engines.recipes.sft.config import SFTRecipe
from engines.recipes.sft.diagnosis import diagnose, finite_samples
from engines.recipes.sft.onward import last_saved, onward
from engines.recipes.sft.state import RunState
from engines.recipes.sft.writer import Writer
from engines.worker import TrainingWorker


class TrainingLoop:
    """Steps, evaluations and checkpoints. All ranks make one and run it; only the first has a writer that writes."""

    def __init__(
        self,
        recipe: SFTRecipe,
        worker: TrainingWorker,
        train: Samples,
        evaluation: Samples | None,
        rank: Rank,
        *,
        total_steps: int,
        start: Start,
    ) -> None:
        """Take the place where the run begins, loading the checkpoint there. Raises `CheckpointError`."""
        self._trainer = recipe.trainer
        self._worker = worker
        self._device = DeviceServices(worker.device)
        self._train, self._evaluation = train, evaluation
        self._rank = rank
        self._total_steps = total_steps
        self._order = SampleOrder(len(train), shuffle=self._trainer.shuffle, seed=self._trainer.seed)
        self._loss = SFTLoss()
        self._step = start.step
        self._state = RunState.of(self._trainer, train)
        if start.checkpoint is not None:
            rank.at(f"loading {start.checkpoint}")
            self._state.restore(worker.load_checkpoint(start.checkpoint), start.checkpoint)

    def run(self, writer: Writer) -> int:
        """Train to the end, or until asked to stop; returns the exit code, equal on all ranks.

        Raises `RunFailed` after `max_skipped` steps in a row with gradients that weren't finite, and
        `CheckpointError` where a checkpoint can't be written and `on_save_error` doesn't let the run go on.
        """
        with writer:
            checkpoints = Checkpoints(self._trainer, self._worker, writer, self._rank, self._step)
            while self._step < self._total_steps:
                checkpoints.settle()
                if signum := self._rank.stop.agreed():
                    return self._stop(writer, checkpoints, signum)
                self._step += 1
                self._rank.at(f"step {self._step}")
                self._train_step(writer, checkpoints)
                if self._trainer.save_every and self._step % self._trainer.save_every == 0:
                    checkpoints.save(self._step, self._state.to_json())
            checkpoints.save(self._step, self._state.to_json())
            checkpoints.finish()
            if self._trainer.export:
                self._export(writer)
            checkpoints.check(self._step)
            writer.finish(self._step)
        return 0

    def _train_step(self, writer: Writer, checkpoints: Checkpoints) -> None:
        indices = self._order.step(self._step, self._trainer.mini_batch_size)
        batch = _pack(self._train, indices)
        self._device.reset_peak_memory()
        began = time.perf_counter()
        metrics = self._train_mini_batch(batch, checkpoints)
        seconds = time.perf_counter() - began
        not_finite = metrics.pop("not_finite", [])
        line = _line(self._step, metrics, seconds)
        if memory := self._device.memory():
            line["peak_memory_bytes"] = memory.peak
        line["epoch"] = self._step * self._trainer.mini_batch_size / len(self._train)
        every = self._trainer.eval_every
        if self._evaluation and (self._step == self._total_steps or (every and self._step % every == 0)):
            self._rank.at(f"evaluation after step {self._step}")
            line |= self._evaluate(self._evaluation)
        writer.step(line)
        self._state.count_skipped(line["skip_reason"])
        if self._state.skipped_in_a_row >= self._trainer.max_skipped:
            self._give_up(checkpoints, indices, batch, not_finite)

    def _train_mini_batch(self, batch: Batch, checkpoints: Checkpoints) -> dict[str, Any]:
        try:
            return self._worker.train_mini_batch(batch, self._loss)
        except CheckpointError as error:  # of the save in the background; nothing of this step is done yet
            checkpoints.failed(error)
            return self._worker.train_mini_batch(batch, self._loss)

    def _evaluate(self, samples: Samples) -> dict[str, Any]:
        """Mean loss over all targets of `samples`, in pieces of a mini-batch, in file order."""
        total, targets = 0.0, 0
        size = self._trainer.mini_batch_size
        for first in range(0, len(samples), size):
            piece = _pack(samples, range(first, min(first + size, len(samples))))
            metrics = self._worker.evaluate(piece, self._loss)
            total += metrics["loss"] * metrics["targets"]
            targets += metrics["targets"]
        return {"eval_loss": total / targets if targets else None, "eval_targets": targets}

    def _export(self, writer: Writer) -> None:
        self._rank.at("exporting")
        try:
            self._worker.export(writer.folder.export)
        except ModelError as error:
            kept, command = onward(writer.folder, self._trainer)
            raise ModelError(f"{error.message}; {kept}", error.remedy or f"Mend it, and {command}.") from error

    def _stop(self, writer: Writer, checkpoints: Checkpoints, signum: int) -> int:
        if self._trainer.save_on_exit:
            checkpoints.save(self._step, self._state.to_json())
        checkpoints.finish()
        writer.stopped(self._step)
        return exit_code(signum)

    def _give_up(self, checkpoints: Checkpoints, indices: list[int], batch: Batch, not_finite: list[str]) -> NoReturn:
        unsaved = ""
        try:
            checkpoints.finish()
        except CheckpointError as error:
            unsaved = f"\nBesides, {error}"
        finite = finite_samples(self._worker, batch)
        places = dict(zip((self._train.places[index] for index in indices), finite, strict=True))
        raise RunFailed(
            f"the gradients of {self._state.skipped_in_a_row} steps in a row were not finite (trainer.max_skipped),"
            f" the last one step {self._step}; {last_saved(checkpoints.saved)}.\n"
            f"{diagnose(places, not_finite)}{unsaved}"
        )


def _pack(samples: Samples, indices: Any) -> Batch:
    return Batch.from_sequences([samples.row(index) for index in indices])


def _line(step: int, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A step's line of metrics.jsonl; what the engine adds comes behind."""
    skipped = metrics.pop("skipped_step")
    known = {name: metrics.pop(name) for name in ("loss", "grad_norm", "lr", "tokens", "targets")}
    return {
        "step": step,
        **known,
        "tokens_per_second": known["tokens"] / seconds,
        "skipped_step": skipped is not None,
        "skip_reason": skipped,
        "seconds": seconds,
        **metrics,
    }
