"""A rank that another launcher started says itself what ended it, as our launcher would."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from engines.errors import DataError
from engines.launch import Job, RunFailed, run_here, world
from engines.launch.stopping import STOP_SIGNALS

SAID = {
    "memory": (
        MemoryError("DefaultCPUAllocator: can't allocate memory\nframe 0"),
        "Error: rank 1 ran out of memory (step 3): MemoryError: DefaultCPUAllocator: can't allocate memory\nSmaller ",
    ),
    "stopped": (RunFailed("the loss was never finite"), "Error: the loss was never finite\n"),
    "defect": (KeyError("boom"), "Error: rank 1 failed: KeyError: 'boom'\nTraceback"),
    "peer": (
        RuntimeError("Connection closed by peer"),
        "Error: rank 1 lost the others: RuntimeError: Connection closed by peer\nIt was at step 3\nTraceback",
    ),
}


class Ready:
    """A meeting at which all are ready."""

    def __init__(self, *place: Any) -> None: ...

    def agree(self, alike: Any) -> None: ...


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(world, "Meeting", Ready)
    monkeypatch.setattr(world, "has_meeting_place", lambda: True)
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    yield Job("module:function", {}, 2, 60.0)
    for each, handler in before.items():
        signal.signal(each, handler)


def test_what_ended_a_rank_is_said_in_one_message(job: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for error, said in SAID.values():

        def fail(job: Job, rank: Any, error: Exception = error) -> int:
            rank.at("step 3")
            raise error

        monkeypatch.setattr(world, "run_target", fail)
        assert run_here(job, 1) == 1
        assert capsys.readouterr().err.startswith(said)
    assert waits == [1, 1, 1, 5], "in which others speak first, most of all who caused it"


def test_what_the_user_must_mend_is_raised(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, rank: Any) -> int:
        raise DataError("data.jsonl, line 3: broken")

    monkeypatch.setattr(world, "run_target", fail)
    with pytest.raises(DataError, match="line 3: broken"):
        run_here(job, 0)
