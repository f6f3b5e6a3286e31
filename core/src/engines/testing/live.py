"""A live engine on one rank of a world, for what `TrainingWorker` does not show."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import engines
from engines.batch import Batch
from engines.contract import hookimpl
from engines.losses import SFTLoss
from engines.testing.plain import Sample
from engines.testing.runs import OPTIMIZER, pack


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
    return pack(samples[engine.ranks.dp_rank :: engine.ranks.dp_size])


def train_step(engine: engines.Engine, samples: Sequence[Sample]) -> tuple[float, float]:
    """Loss and gradient norm of one step on this rank's share."""
    metrics = engine.train_batch(share(engine, samples), SFTLoss())
    engine.lr_scheduler_step()
    return metrics["loss"], metrics["grad_norm"]


def weights(engine: engines.Engine) -> dict[str, Tensor]:
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


def live_bytes() -> int:
    """What the tensors of this process hold, wherever they are referred to; a storage counts once."""
    gc.collect()
    plain = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
    storages = [one.untyped_storage() for one in plain if one.layout == torch.strided and not one.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
