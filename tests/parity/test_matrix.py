"""Loss, gradient norm and updated weights do not depend on how the work is laid out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engines.testing.runs import assert_metrics_agree, assert_weights_agree, train_with_worker
from engines.testing.samples import mini_batches
from engines.testing.tiny import REFERENCE_FAMILIES


@dataclass(frozen=True)
class Layout:
    """How many processes, how large the mini-batch, and what the engine is told."""

    processes: int
    size: int = 8
    engine: dict[str, object] = field(default_factory=dict)


LAYOUTS = {
    "1": Layout(1),
    "2": Layout(2),
    "4": Layout(4),
    "3, uneven": Layout(3, size=7),
    "2 x 2": Layout(4, engine={"data_parallel_replicate_size": 2}),
}
BATCHING = {
    "whole": {},
    "micro 1": {"micro_batch_size": 1},
    "budget": {"max_tokens_per_micro_batch": 128},
}
OPTIONS = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "kept": {"reshard_after_forward": False},
    "sharded": {"accumulate_gradients": "sharded"},
}
SAMPLE = {
    ("llama", "1", "whole", "plain"),
    ("llama_tied", "1", "micro 1", "plain"),
    ("qwen2", "2", "whole", "plain"),
    ("llama_tied", "2", "budget", "plain"),
    ("qwen3", "2", "micro 1", "checkpointing"),
    ("qwen3_moe", "2", "micro 1", "plain"),
    ("llama", "4", "micro 1", "plain"),
    ("qwen3_moe", "4", "budget", "plain"),
    ("qwen2", "3, uneven", "budget", "plain"),
    ("qwen3_moe", "3, uneven", "whole", "plain"),
    ("qwen3", "2 x 2", "budget", "plain"),
    ("llama_tied", "2 x 2", "whole", "checkpointing"),
    ("llama", "2", "budget", "sharded"),
    ("qwen2", "2", "micro 1", "kept"),
}
"""What `make test` runs: each family, layout, batching and option more than once."""


def _cases() -> list[object]:
    wide = [  # two of the three batchings for each family and layout, in turns
        (family, layout, batching, "plain")
        for place, family in enumerate(REFERENCE_FAMILIES)
        for turn, layout in enumerate(LAYOUTS)
        for number, batching in enumerate(BATCHING)
        if (place + turn + number) % 3
    ]
    options = [
        (family, layout, "micro 1", option)
        for family in ("llama_tied", "qwen3_moe")
        for layout in ("1", "2", "2 x 2")
        for option in OPTIONS
        if option != "plain"
    ]
    return [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.more, id=", ".join(case))
        for case in [*wide, *options, *sorted(SAMPLE - {*wide, *options})]
    ]


@pytest.mark.parametrize(("family", "layout", "batching", "option"), _cases())
def test_equals_the_reference(family, layout, batching, option, world, folder, reference_run):
    how = LAYOUTS[layout]
    settings = {"strategy": "fsdp2", "device": "cpu", **how.engine, **BATCHING[batching], **OPTIONS[option]}
    runs = world(how.processes)(train_with_worker, folder(family), mini_batches(how.size), settings)
    expected = reference_run(family, how.size)
    assert_metrics_agree(runs, expected)
    assert_weights_agree(runs[0].weights, expected.weights)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("llama", "qwen3_moe") else pytest.mark.more)
        for family in REFERENCE_FAMILIES
    ],
)
def test_default_eps(family, world, folder, reference_run):
    """Metrics alone: with the default eps, weights without a true gradient move by rounding noise."""
    settings = {"strategy": "fsdp2", "device": "cpu", "micro_batch_size": 2}
    runs = world(2)(train_with_worker, folder(family), mini_batches(), settings, {"lr": 1e-3})
    assert_metrics_agree(runs, reference_run(family, 8, eps=1e-8))
