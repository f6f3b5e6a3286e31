"""A job for the launcher: Megatron in two pipeline stages, one of which raises in the middle of the schedule."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from engines import Batch, TrainingWorker, hookimpl
from engines.launch import Rank
from engines.losses import SFTLoss

MICRO_BATCHES, FAILS_AT = 6, 3


class Fails:
    """Raises in the forward of one micro-batch, once it is armed."""

    def __init__(self, folder: Path) -> None:
        self.armed = False
        self._folder = folder

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, index: int) -> Generator[None, Any, Any]:
        if self.armed and index == FAILS_AT:
            (self._folder / "raised").write_text(str(time.time()))
            raise KeyError("planted in the schedule")
        return (yield)


def run(payload: Mapping[str, Any], rank: Rank) -> int:
    """One step that succeeds, one in which the stage that the file `stage` names raises."""
    folder = Path(payload["folder"])
    engine = {"strategy": "megatron", "device": "cpu", "pipeline_parallel_size": 2, "micro_batch_size": 1}
    fails = Fails(folder)
    worker = TrainingWorker({"path": str(folder / "model")}, engine, {"lr": 1e-3}, wrappers=[fails])
    worker.initialize()
    batch = Batch.from_sequences([{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1]}] * MICRO_BATCHES)
    assert worker.train_mini_batch(batch, SFTLoss())["skipped_step"] is None
    fails.armed = rank.rank == int((folder / "stage").read_text())
    rank.at("step 2")
    worker.train_mini_batch(batch, SFTLoss())
    return 0
