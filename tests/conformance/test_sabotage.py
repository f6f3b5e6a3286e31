"""The kit catches what it claims: engines that break the contract in one way each, held to the whole of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.sabotage import SABOTAGES, SOUND, Sabotage
from support.sabotage.running import Kits

ALL = 60
"""Tests of the kit that any engine meets, at least."""
OTHERS = 3
"""How many clauses, test functions of the kit whatever their parameters, may notice a sabotage beside its own."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def kits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kits]:
    """The kit on all engines that this session asks for, in the order in which it does."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["sabotage"] for item in mine if "kits" in item.fixturenames]
    kits = Kits(asked, tmp_path_factory.mktemp("kits"))
    yield kits
    kits.close()


@pytest.mark.sabotage
@pytest.mark.parametrize("sabotage", [SOUND], ids=["sound"])
def test_a_sound_engine_of_several_processes_passes(sabotage: Sabotage, kits: Kits) -> None:
    outcome = kits.outcome_of(sabotage)
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
def test_it_is_caught(sabotage: Sabotage, kits: Kits) -> None:
    outcome = kits.outcome_of(sabotage)
    assert outcome.tests > ALL
    assert sabotage.caught_by in outcome.failures, f"{sabotage.caught_by} did not catch it, but {outcome}"
    others = outcome.failures.keys() - {sabotage.caught_by}
    assert len(others) <= OTHERS, f"{len(others)} clauses beside {sabotage.caught_by} caught it: {outcome}"
