"""After an exception in the middle of a step the next step is as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.losses import SFTLoss
from engines.testing.samples import mini_batches
from support.engine import Fail
from support.fsdp2 import fsdp2, share, train_step


def steps(
    folder: Path, settings: dict[str, Any], dtype: str, after: bool | None = None, forward_only: bool = False
) -> list[tuple[float, float]]:
    first, second, _ = mini_batches()
    with fsdp2(folder, {"micro_batch_size": 1, **settings}, dtype=dtype) as engine:
        train_step(engine, second)
        if after is not None:
            engine.wrap(Fail(at=1, after=after))
            run = engine.infer_batch if forward_only else lambda batch: engine.train_batch(batch, SFTLoss())
            with pytest.raises(RuntimeError, match="injected"):
                run(share(engine, first))
        return [train_step(engine, first), train_step(engine, second)]


SHARDED = {"accumulate_gradients": "sharded"}
KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("settings", "dtype", "after", "forward_only"),
    [
        ({}, "float32", False, False),
        ({}, "float32", True, False),
        ({}, "float32", False, True),
        ({}, "bfloat16", False, False),
        (SHARDED, "float32", False, False),
        pytest.param(SHARDED, "float32", True, False, marks=pytest.mark.more),
        pytest.param(SHARDED, "bfloat16", True, False, marks=pytest.mark.more),
        pytest.param(KEPT, "float32", False, False, marks=pytest.mark.more),
        pytest.param(KEPT, "float32", True, True, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_a_failed_step_leaves_nothing_behind(
    settings: dict[str, Any],
    dtype: str,
    after: bool,
    forward_only: bool,
    world: Any,
    folder: Callable[[str], Path],
) -> None:
    two = world(2)
    undisturbed = two(steps, folder("llama"), settings, dtype)
    assert two(steps, folder("llama"), settings, dtype, after, forward_only) == undisturbed
