"""Crashes, full disks and failing ranks: what bears a checkpoint's name is complete, and ranks fail together."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines import checkpoint
from engines.checkpoint import CheckpointStore
from engines.contract import Shard
from engines.errors import CheckpointError
from support.checkpoints import save_on_rank, save_whole, tensors

CHANGES = frozenset({"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"})
"""Python's audit events of whatever changes what is on the disk, beside plain writes."""


def in_a_process(function: Callable[..., None], *args: Any) -> int:
    """Run it in a process of its own; its exit code, negative for a signal."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def killed_at(last_event: int, function: Callable[[], object]) -> None:
    """Run `function`, and be killed by SIGKILL right before its `last_event`-th change to the disk."""
    events = 0

    def count(event: str, args: object) -> None:
        nonlocal events
        if event in CHANGES:
            events += 1
            if events == last_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    function()


@pytest.mark.parametrize("step", [10, 20], ids=["replacing", "new"])
def test_saving_killed_at_any_moment(tmp_path: Path, step: int) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save_whole(store.path(10), step=10)
    for last_event in range(1, 100):
        code = in_a_process(killed_at, last_event, partial(save_whole, store.path(step), step=step))
        listing = store.listing()
        assert listing.damaged == {}
        for path in listing.complete.values():
            checkpoint.open(path)
        mentioned = store.clean_up()
        assert len(mentioned) == len(listing.leftovers)
        assert 10 in store.steps(), f"lost at change {last_event}: {mentioned}"
        assert {path.name for path in store.folder.iterdir()} == {f"step-{done}" for done in store.steps()}
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert last_event > 9, "the save was never really interrupted"
    checkpoint.open(store.path(step))


def test_retention_killed_at_any_moment(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for last_event in range(1, 100):
        for step in (10, 20):
            save_whole(store.path(step), step=step)
        code = in_a_process(killed_at, last_event, lambda: store.retain(1))
        assert store.listing().damaged == {}
        assert store.latest() == store.path(20)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        store.clean_up()
    assert last_event > 6, "the deletion was never really interrupted"
    assert store.steps() == [20]


def save_within(path: Path, file_size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    whole = {"model.w": torch.zeros(1000), "optimizer.w": torch.zeros(3000)}
    try:
        save_whole(path, shards=[Shard(key, tuple(w.shape), (0,), w) for key, w in whole.items()])
    except CheckpointError as error:
        assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG
        os._exit(17)


@pytest.mark.parametrize("file_size", [0, 100, 5000, 12000])
def test_no_room_leaves_nothing(tmp_path: Path, file_size: int) -> None:
    assert in_a_process(save_within, tmp_path / "step-20", file_size) == 17
    assert list(tmp_path.iterdir()) == []


def test_room_enough(tmp_path: Path) -> None:
    assert in_a_process(save_within, tmp_path / "step-20", 20000) == 0
    checkpoint.open(tmp_path / "step-20")


def test_a_full_disk_on_one_rank_fails_all_with_its_cause(tmp_path: Path, world) -> None:
    for message in world(2)(fail_on_rank_1, tmp_path / "step-20"):
        assert "rank 1: " in message.splitlines()[0] and "File too large" in message
    assert list(tmp_path.iterdir()) == []


def fail_on_rank_1(path: Path) -> str:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_on_rank(path, tensors())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value)


def test_a_defect_on_one_rank_stays_a_defect_and_fails_all(tmp_path: Path, world) -> None:
    names = world(2)(meet_a_defect, tmp_path / "step-20")
    assert names[1].startswith("ZeroDivisionError")
    assert names[0].startswith("RuntimeError: cannot save") and "rank 1: ZeroDivisionError" in names[0]
    assert list(tmp_path.iterdir()) == []


def meet_a_defect(path: Path) -> str:
    def shards() -> Any:
        yield from ()
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in the engine")

    try:
        save_on_rank(path, {}, shards=shards())
    except (RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_states_that_differ_between_ranks_are_refused(tmp_path: Path, world) -> None:
    for message in world(2)(save_different_states, tmp_path / "step-20"):
        assert "the state of rank 1 differs from that of rank 0" in message
    assert list(tmp_path.iterdir()) == []


def save_different_states(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        save_on_rank(path, tensors(), state={"position": dist.get_rank()})
    return str(caught.value)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, (2, 3)]}, r"a\[1\]"),
        ({"a": {"b": {1: 2}}}, "keys .* at a.b"),
        ({"a": float("nan")}, "Out of range float values"),
        ({"a": torch.ones(1)}, "not JSON serializable"),
    ],
)
def test_state_that_json_would_change_is_a_defect(tmp_path: Path, state: dict[str, Any], place: str) -> None:
    with pytest.raises(TypeError, match=place):
        save_whole(tmp_path / "step-20", state=state)
    assert list(tmp_path.iterdir()) == []
