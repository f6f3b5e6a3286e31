"""Megatron at every layout trains the model that plain transformers and PyTorch train."""

from __future__ import annotations

import pytest

from engines.testing.runs import assert_metrics_agree, assert_weights_agree, train_with_worker
from engines.testing.samples import mini_batches
from support.megatron import FAMILIES, LAYERS, LAYOUTS, fits, settings

METRICS, WEIGHTS = 5e-6, 3e-5
TIME_LIMIT = 90.0
"""Seconds for a case: what Megatron runs wrongly may abort its processes, or hang them."""

BATCHING = {
    "whole": {},
    "micro 1": {"micro_batch_size": 1},
    "budget": {"max_tokens_per_micro_batch": 128},
}
PER_FAMILY = 3
"""Layouts that `make test` runs of each model."""


def _sample() -> set[tuple[str, str]]:
    """Three layouts a model, other three for the next; every layout with two models at least."""
    chosen = set()
    for number, family in enumerate(FAMILIES):
        layouts = [layout for layout in LAYOUTS if fits(family, layout)]
        chosen |= {(family, layouts[(number * PER_FAMILY + place * 2) % len(layouts)]) for place in range(PER_FAMILY)}
        short = PER_FAMILY - len({layout for one, layout in chosen if one == family})
        rest = [layout for layout in layouts if (family, layout) not in chosen]
        chosen |= {(family, layout) for layout in rest[:short]}
    for layout in LAYOUTS:
        able = [family for family in FAMILIES if fits(family, layout)]
        having = [family for family in able if (family, layout) in chosen]
        others = [family for family in able if family not in having]
        chosen |= {(family, layout) for family in others[: max(0, 2 - len(having))]}
    return chosen


SAMPLE = _sample()


def test_the_sample_is_fair():
    for family in FAMILIES:
        assert sum(one == family for one, _ in SAMPLE) >= PER_FAMILY
    for layout in LAYOUTS:
        assert sum(one == layout for _, one in SAMPLE) >= 2


def _cases():
    """Every model at every layout, with one of the three ways to cut micro-batches: each layout meets all of them."""
    for place, layout in enumerate(LAYOUTS):
        for turn, family in enumerate(family for family in FAMILIES if fits(family, layout)):
            batching = list(BATCHING)[(place + turn) % len(BATCHING)]
            marks = () if (family, layout) in SAMPLE else pytest.mark.more
            yield pytest.param(family, layout, batching, marks=marks, id=f"{family}, {layout}, {batching}")


@pytest.fixture(scope="session")
def deep(folder):
    """`deep(family)`: a model with as many layers as the layouts need."""
    return lambda family: folder(family, num_hidden_layers=LAYERS)


@pytest.mark.parametrize(("family", "layout", "batching"), list(_cases()))
def test_equals_the_reference(family, layout, batching, world, deep, reference_run):
    engine = settings(layout, **BATCHING[batching])
    run = world(LAYOUTS[layout].processes)
    runs = run(train_with_worker, deep(family), mini_batches(), engine, timeout=TIME_LIMIT)
    expected = reference_run(family, 8, num_hidden_layers=LAYERS)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


@pytest.mark.parametrize("layout", ["single", "tp2 sp", "pp2"])
def test_a_padding_token_that_is_read(layout, world, folder, reference_run):
    """Instruct models end turns with it; transformers gives its embedding no gradient for that."""
    model = {"num_hidden_layers": LAYERS, "pad_token_id": mini_batches()[0][0].input_ids[1]}
    run = world(LAYOUTS[layout].processes)
    runs = run(train_with_worker, folder("llama_tied", **model), mini_batches(), settings(layout), timeout=TIME_LIMIT)
    expected = reference_run("llama_tied", 8, **model)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)
