"""An fsdp2 engine on one rank of a world, for tests of what the contract does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn import Module

import engines
from engines.batch import Batch
from engines.contract import hookimpl
from engines.losses import SFTLoss
from support.reference import Sample

OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}


class Spy:
    """A wrapper that keeps the model that runs."""

    model: Module

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Module) -> Iterator[None]:
        self.model = chunk
        return (yield)


@contextmanager
def fsdp2(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
    optimizer: Mapping[str, Any] | None = OPTIMIZER,
    wrappers: Sequence[object] = (),
) -> Iterator[engines.Engine]:
    """An initialised engine, closed at the end."""
    engine = engines.create(
        {"path": str(folder), "dtype": dtype},
        {"strategy": "fsdp2", "device": "cpu", **(settings or {})},
        optimizer,
        wrappers=wrappers,
    )
    with engine:
        engine.initialize()
        yield engine


def share(engine: engines.Engine, samples: Sequence[Sample]) -> Batch:
    """This rank's every n-th sample, which may be none."""
    mine = samples[engine.ranks.dp_rank :: engine.ranks.dp_size]
    return Batch.from_sequences([vars(sample) for sample in mine]) if mine else Batch.empty()


def train_step(engine: engines.Engine, samples: Sequence[Sample]) -> tuple[float, float]:
    """Loss and gradient norm of one step on this rank's share."""
    metrics = engine.train_batch(share(engine, samples), SFTLoss())
    engine.lr_scheduler_step()
    return metrics["loss"], metrics["grad_norm"]


def weights(engine: engines.Engine) -> dict[str, Any]:
    """Full tensors by name; all ranks call it."""
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
