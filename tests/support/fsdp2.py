"""An fsdp2 engine on one rank of a world, for tests of what the contract does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.nn import Module

import engines
from engines.contract import hookimpl
from support.engine import OPTIMIZER, opened, share, train_step, weights

__all__ = ["OPTIMIZER", "Spy", "fsdp2", "share", "train_step", "weights"]


class Spy:
    """A wrapper that keeps the model that runs."""

    model: Module

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Module) -> Iterator[None]:
        self.model = chunk
        return (yield)


def fsdp2(
    folder: Path, settings: Mapping[str, Any] | None = None, **more: Any
) -> AbstractContextManager[engines.Engine]:
    """An initialised engine, closed at the end; `more`: see `support.engine.opened`."""
    return opened(folder, {"strategy": "fsdp2", "device": "cpu", **(settings or {})}, **more)
