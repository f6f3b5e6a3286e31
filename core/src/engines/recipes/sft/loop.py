"""The loop over steps, the same on every rank."""

from __future__ import annotations

import time
from typing import Any

from engines.batch import Batch
from engines.device_services import DeviceServices
from engines.launch import Rank, RunFailed
from engines.launch.stopping import exit_code
from engines.losses import SFTLoss
from engines.recipes.data import SampleOrder, Samples
from engines.recipes.output.folder import Start
from engines.recipes.sft.config import SFTRecipe
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
        self._step = self._begun = self._saved = start.step
        self._state = RunState.of(self._trainer, train)
        if start.checkpoint is not None:
            rank.at(f"loading {start.checkpoint}")
            self._state.restore(worker.load_checkpoint(start.checkpoint), start.checkpoint)

    def run(self, writer: Writer) -> int:
        """Train to the end, or until asked to stop; returns the exit code, equal on all ranks.

        Raises `RunFailed` after `max_skipped` steps in a row with gradients that weren't finite.
        """
        with writer:
            while self._step < self._total_steps:
                self._settle(writer)
                if signum := self._rank.stop.agreed():
                    return self._stop(writer, signum)
                self._step += 1
                self._rank.at(f"step {self._step}")
                self._train_step(writer)
                if self._trainer.save_every and self._step % self._trainer.save_every == 0:
                    self._save(writer)
            self._save(writer)
            self._finish_saving(writer)
            if self._trainer.export:
                self._rank.at("exporting")
                self._worker.export(writer.folder.export)
            writer.finish(self._step)
        return 0

    def _train_step(self, writer: Writer) -> None:
        indices = self._order.step(self._step, self._trainer.mini_batch_size)
        batch = _pack(self._train, indices)
        self._device.reset_peak_memory()
        began = time.perf_counter()
        metrics = self._worker.train_mini_batch(batch, self._loss)
        seconds = time.perf_counter() - began
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
            self._finish_saving(writer)
            raise RunFailed(self._diagnosis(indices))

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

    def _save(self, writer: Writer) -> None:
        """A checkpoint of this step, once; lines of metrics are on the disk before it appears."""
        if self._begun == self._step:
            return
        self._rank.at(f"saving after step {self._step}")
        writer.sync()
        path = writer.folder.checkpoint(self._step)
        self._worker.save_checkpoint(
            path,
            step=self._step,
            state=self._state.to_json(),
            contents=self._trainer.checkpoint_contents,
            background=self._trainer.async_save,
        )
        self._saved, self._begun = self._begun, self._step  # the one before is complete: there are never two at once
        self._settle(writer)

    def _settle(self, writer: Writer) -> None:
        """Note that the last checkpoint is complete, once it is."""
        if self._saved != self._begun and self._worker.engine.saving is None:
            self._saved = self._begun
            writer.retain(self._trainer.keep)

    def _finish_saving(self, writer: Writer) -> None:
        """Wait for the last checkpoint, if it is still being written."""
        if self._worker.engine.saving is not None:
            self._rank.at(f"waiting for {self._worker.engine.saving} to be written")
            self._worker.engine.finish_saving()
        self._settle(writer)

    def _stop(self, writer: Writer, signum: int) -> int:
        if self._trainer.save_on_exit:
            self._save(writer)
        self._finish_saving(writer)
        writer.stopped(self._step, self._saved)
        return exit_code(signum)

    def _diagnosis(self, indices: list[int]) -> str:
        places = "\n".join(f"  {self._train.places[index]}" for index in sorted(set(indices))[:8])
        kept = f"step {self._saved} is the last one saved" if self._saved else "no checkpoint was saved"
        return (
            f"the gradients of {self._state.skipped_in_a_row} steps in a row were not finite"
            f" (trainer.max_skipped), the last one step {self._step}; {kept}.\n"
            f"Often the learning rate is too high, or the data broken. Samples of that step:\n{places}"
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
