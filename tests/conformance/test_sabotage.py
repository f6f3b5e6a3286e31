"""The kit catches what it claims: engines that break the contract in one way each, held to the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.testing.fixtures import Model, PlainRun, kit_models, kit_plain_runs, kit_worlds  # noqa: F401 (fixtures)
from engines.testing.world import Worlds
from support.sabotage import SABOTAGES, SOUND, Sabotage, registered
from support.sabotage.running import Shared, run_kit

ALL = 60
"""Tests of the kit that any engine meets, at least."""
OTHERS = 3
"""How many clauses, test functions of the kit whatever their parameters, may notice a sabotage beside its own."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shared(kit_worlds: Worlds, kit_models: Model, kit_plain_runs: PlainRun) -> Iterator[Shared]:  # noqa: F811
    with registered():
        yield Shared(kit_worlds, kit_models, kit_plain_runs)


@pytest.mark.sabotage
def test_a_sound_engine_of_several_processes_passes(shared: Shared, tmp_path: Path) -> None:
    outcome = run_kit(SOUND, shared, tmp_path)
    assert outcome.tests > ALL
    assert not outcome.failures, str(outcome)


def test_no_sabotage_is_named_twice() -> None:
    assert len({one.name for one in SABOTAGES}) == len(SABOTAGES) >= 15


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.more if one.often else pytest.mark.sabotage)
        for one in SABOTAGES
    ],
)
def test_it_is_caught(sabotage: Sabotage, shared: Shared, tmp_path: Path) -> None:
    outcome = run_kit(sabotage, shared, tmp_path)
    assert outcome.tests > ALL
    assert sabotage.caught_by in outcome.failures, f"{sabotage.caught_by} did not catch it, but {outcome}"
    others = outcome.failures.keys() - {sabotage.caught_by}
    assert len(others) <= OTHERS, f"{len(others)} clauses beside {sabotage.caught_by} caught it: {outcome}"
