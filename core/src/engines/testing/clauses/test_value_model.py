"""A value model, where the manifest has one, is the plain backbone with a linear head."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from engines.registry import registry
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.plain import Run
from engines.testing.runs import assert_metrics_agree, assert_weights_agree
from engines.testing.subject import Subject
from engines.testing.values import (
    ValueLoss,
    Values,
    assert_values_agree,
    plain_run,
    scored_folder,
    train_values,
    valued,
)

METRICS, WEIGHTS = 5e-6, 3e-5
"""As in training."""


def has_none(subject: Subject) -> str | None:
    chosen = subject.selection
    declared = any(
        "value_model" in one.model_types
        for one in registry.candidates()
        if (one.distribution, one.backend, one.device) == (chosen.distribution, chosen.backend, chosen.device)
    )
    return None if declared else "its manifest has no value_model"


@cache
def expected(language_model: Path) -> tuple[Path, tuple[Values, Run]]:
    """A value model beside the language model in that folder, and what plain PyTorch makes of it."""
    folder = scored_folder(language_model.with_name("value_model"), language_model)
    return folder, plain_run(folder, valued())


@clause("contract.md#losses", unless=has_none)
def test_a_value_model_trains_like_a_backbone_with_a_head(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """`values[i]` comes from the hidden state of token i - 1 through a linear head, `last_values` from that of each
    sequence's last token; a loss of both trains backbone and head as plain PyTorch does.
    """
    folder, (values, run) = expected(model(subject.family_at(some_layout)))
    found = on_ranks(some_layout, train_values, folder, valued(), subject.settings(some_layout), ValueLoss())
    assert_values_agree([one for one, _ in found], values)
    assert_metrics_agree([one for _, one in found], run, METRICS)
    assert_weights_agree(found[0][1].weights, run.weights, WEIGHTS)
