"""After an exception in the middle of a step the next step is as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.contract import hookimpl
from engines.losses import SFTLoss
from support.fsdp2 import fsdp2, share, train_step
from support.samples import mini_batches


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


def steps(
    folder: Path, settings: dict[str, Any], after: bool | None, forward_only: bool
) -> list[tuple[float, float]]:
    first, second, _ = mini_batches()
    with fsdp2(folder, {"micro_batch_size": 1, **settings}) as engine:
        train_step(engine, second)
        if after is not None:
            engine.wrap(Fail(at=1, after=after))
            run = engine.infer_batch if forward_only else lambda batch: engine.train_batch(batch, SFTLoss())
            with pytest.raises(RuntimeError, match="injected"):
                run(share(engine, first))
        return [train_step(engine, first), train_step(engine, second)]


@pytest.mark.parametrize("forward_only", [False, True], ids=["train", "infer"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate_gradients": "sharded"}, {"reshard_after_forward": False}], ids=str
)
def test_a_failed_step_leaves_nothing_behind(
    settings: dict[str, Any], after: bool, forward_only: bool, world: Any, folder: Callable[[str], Path]
) -> None:
    two = world(2)
    undisturbed = two(steps, folder("llama"), settings, None, False)
    assert two(steps, folder("llama"), settings, after, forward_only) == undisturbed
