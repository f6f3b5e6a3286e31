"""A live engine on one rank of a world, for tests of what `TrainingWorker` does not show."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engines
from engines.batch import Batch
from engines.contract import hookimpl
from engines.losses import SFTLoss
from engines.testing.plain import Sample

OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}


@contextmanager
def opened(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    dtype: str = "float32",
    optimizer: Mapping[str, Any] | None = OPTIMIZER,
    wrappers: Sequence[object] = (),
    **more: Any,
) -> Iterator[engines.Engine]:
    """An initialised engine, closed at the end; `settings` are `engine:` of a recipe."""
    model = {"path": str(folder), "dtype": dtype}
    with engines.create(model, settings, optimizer, wrappers=wrappers, **more) as engine:
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


class Fail:
    """Raises at one micro-batch, before its forward or after it, once."""

    def __init__(self, at: int, after: bool) -> None:
        self.at: int | None = at
        self.after = after

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, index: int) -> Iterator[None]:
        if not self.after:
            self._raise(index)
        result = yield
        self._raise(index)
        return result

    def _raise(self, index: int) -> None:
        if index == self.at:
            self.at = None
            raise RuntimeError("injected")


def live_groups() -> int:
    """Process groups of this process."""
    return len(dist.distributed_c10d._world.pg_map)


def live_tensors() -> int:
    """Tensors of a model's size, wherever they are referred to."""
    gc.collect()
    return sum(1 for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.numel() > 500)
