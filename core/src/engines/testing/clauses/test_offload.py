"""Parts of an engine go to host memory and come back, and no number changes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Module

from engines.contract import hookimpl
from engines.device_services import DeviceServices
from engines.engine import Engine
from engines.losses import SFTLoss
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

PARTS = ("model", "optimizer", "grad")
EACH = [(part,) for part in PARTS]
LEFT = 0.2
"""The largest share of a device's bytes that may stay there: buffers, tables of positions."""


def move(engine: Engine, device: str, parts: tuple[str, ...]) -> None:
    engine.to(device, **{part: part in parts for part in PARTS})


def train(folder: Path, settings: dict[str, Any], parts: tuple[str, ...]) -> list[Any]:
    """Numbers of three steps, the named parts away and back between a step's gradients and its update, and before
    inference."""
    first, second, third = (pack(samples) for samples in mini_batches())
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        engine, seen = worker.engine, []

        def away_and_back() -> None:
            if parts:
                move(engine, "cpu", parts)
                move(engine, engine.device.type, parts)

        away_and_back()
        for batch in (first, second):
            share = batch.select(range(engine.ranks.dp_rank, len(batch), engine.ranks.dp_size))
            seen.append(engine.forward_backward(share, SFTLoss())["loss"])
            away_and_back()
            seen.append(engine.optimizer_step().grad_norm)
            engine.zero_grad()
            engine.lr_scheduler_step()
            away_and_back()
        outputs = worker.infer_batch(third).outputs
        assert outputs is not None and outputs.log_probs is not None
        return [*seen, *outputs.log_probs.tolist()]


@clause("engines.contract:BaseEngine.move", needs=("offload",))
@pytest.mark.parametrize("parts", [PARTS, *EACH], ids=" ".join)
def test_moving_changes_no_number(
    parts: tuple[str, ...], subject: Subject, some_layout: Layout, once_on_ranks: OnRanks, model: Model
) -> None:
    """Parts, all or one, that went to host memory and came back, between steps and between a step's gradients and its
    update, hold what they held: losses, gradient norms and what is inferred later are equal to the bit.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=3)
    moved, stayed = (once_on_ranks(some_layout, train, folder, settings, which) for which in (parts, ()))
    for rank, (found, expected) in enumerate(zip(moved, stayed, strict=True)):
        off = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        assert not off, (
            f"on rank {rank} {len(off)} of {len(expected)} numbers differ after {' and '.join(parts)} went and came "
            f"back; the first is {found[off[0]]} instead of {expected[off[0]]}"
        )


class Chunks:
    """The model chunks that an engine runs."""

    def __init__(self) -> None:
        self.seen: dict[int, Module] = {}

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Module, chunk_index: int) -> Generator[None, Any, Any]:
        self.seen[chunk_index] = chunk
        return (yield)

    def devices(self) -> set[str]:
        """Where their parameters lie."""
        return {weight.device.type for chunk in self.seen.values() for weight in chunk.parameters()}


@dataclass(frozen=True)
class Placed:
    """What lies where, with everything away and with everything back."""

    own: str
    """The type of the engine's device."""
    away: set[str]
    back: set[str]
    held: list[int] | None
    """Bytes on the device before, while everything is away, and after; None on the CPU, which counts none."""


def place(folder: Path, settings: dict[str, Any]) -> Placed:
    chunks = Chunks()
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER, wrappers=[chunks]) as worker:
        worker.initialize()
        worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        services, own = DeviceServices(worker.device), worker.device.type
        before = services.memory()
        move(worker.engine, "cpu", PARTS)
        away, between = chunks.devices(), services.memory()
        move(worker.engine, own, PARTS)
        back, after = chunks.devices(), services.memory()
        figures = [memory.allocated for memory in (before, between, after) if memory is not None]
        return Placed(own, away, back, figures or None)


@clause("engines.contract:BaseEngine.move", needs=("offload",))
def test_parts_lie_where_they_were_sent(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """With everything on "cpu" the model's parameters are there, and the device holds next to nothing of this
    process; back again, they are on the engine's own device. (An engine on the CPU is always there.)
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    for rank, placed in enumerate(on_ranks(some_layout, place, folder, settings)):
        assert placed.away == {"cpu"}, f"after to('cpu') parameters of rank {rank} are on {sorted(placed.away)}"
        assert placed.back == {placed.own}, (
            f"after to({placed.own!r}) parameters of rank {rank} are on {sorted(placed.back)}"
        )
        if placed.held is not None:
            before, between, after = placed.held
            assert between <= LEFT * before, f"with everything away, rank {rank} holds {between} of {before} bytes"
            assert between < after, f"with everything back, rank {rank} holds {after} bytes on the device"
