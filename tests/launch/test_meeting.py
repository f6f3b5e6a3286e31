"""Ranks of a foreign launcher begin together, and with the same job, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from engines.errors import ConfigError, LaunchError
from engines.launch import Rank, meeting
from engines.launch.meeting import Meeting
from engines.launch.stopping import StopRequest

SIZE = 3


class Silent(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`meet(*acts)`: what each rank's act on its `Meeting` returned or raised. The last is on another machine."""
    store = dist.HashStore()

    def rendezvous(url: str, rank: int, size: int, **_: Any) -> Iterator[Any]:
        yield store, rank, size

    def leave() -> None:
        raise Silent

    def refusal(self: Meeting, message: str) -> meeting.Refusal:
        return meeting.Refusal(self.rank, "far" if self.rank == SIZE - 1 else "near", "", message)

    monkeypatch.setattr("torch.distributed.rendezvous", rendezvous)
    monkeypatch.setattr(meeting, "die_with_parent", lambda *_, **__: None)
    monkeypatch.setattr(meeting, "_leave_silently", leave)
    monkeypatch.setattr(Meeting, "_refusal", refusal)

    def take_part(rank: int, act: Callable[[Meeting], Any]) -> Any:
        try:
            return act(Meeting(rank, SIZE, 20))
        except (ConfigError, LaunchError, Silent) as error:
            return error

    def run(*acts: Callable[[Meeting], Any]) -> list[Any]:
        with ThreadPoolExecutor(SIZE) as threads:
            return list(threads.map(take_part, range(SIZE), acts))

    return run


def test_all_are_ready(meet: Callable[..., list[Any]]) -> None:
    assert meet(*[lambda one: one.agree({"optimizer.lr": 1})] * SIZE) == [None] * SIZE


def test_one_would_run_something_else(meet: Callable[..., list[Any]]) -> None:
    """Any of them; the machine that differs says what, the others that it does."""
    same, other = ({"optimizer.lr": lr, "data.train": "a"} for lr in (1e-3, 2e-3))
    first, second, third = meet(*(lambda one, alike=alike: one.agree(alike) for alike in (same, same, other)))
    assert isinstance(third, ConfigError) and "\n  optimizer.lr: 0.002, not 0.001\n" in str(third)
    assert "data.train" not in str(third)
    for each in (first, second):
        assert isinstance(each, LaunchError) and str(each).startswith(
            "rank 2, on far, does not start: what is to run"
        )


def test_the_first_refuses(meet: Callable[..., list[Any]]) -> None:
    """Those beside it are silent, those elsewhere say why they end."""
    ready = lambda one: one.agree({})  # noqa: E731
    first, second, third = meet(lambda one: one.refuse("no room"), ready, ready)
    assert first is None, "its caller raises"
    assert isinstance(second, Silent)
    assert isinstance(third, LaunchError) and str(third) == "rank 0, on near, does not start: no room"


def test_what_all_find_wrong_is_said_once_on_each_machine(meet: Callable[..., list[Any]]) -> None:
    first, second, third = meet(*[lambda one: one.refuse("no such key")] * SIZE)
    assert (first, third) == (None, None)
    assert isinstance(second, Silent)


def in_group(alike: list[dict[str, Any]]) -> str:
    """Of a rank whose launcher keeps no store: what is said when it has a process group."""
    number = dist.get_rank()
    rank = Rank(number, dist.get_world_size(), StopRequest(), uncompared=alike[number])
    try:
        rank.meet()
    except ConfigError as error:
        return str(error)
    return ""


def test_without_a_launchers_store_ranks_are_compared_in_their_group(world: Callable[[int], Any]) -> None:
    ranks = world(2)
    assert ranks(in_group, [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.1}]) == ["", ""]
    for said in ranks(in_group, [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]):
        assert said.startswith("no rank starts: rank 1: what is to run on ")
        assert "\n  optimizer.lr: 0.2, not 0.1\nStart all ranks with one command" in said
