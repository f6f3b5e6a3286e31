"""Saves that go on beside training: what they hold, that there is one at a time, and where their errors come up."""

from __future__ import annotations

import logging
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines import checkpoint
from engines.checkpoint import CheckpointStore, Contents, Saver
from engines.checkpoint.saving import Saving
from engines.errors import CheckpointError
from support.checkpoints import MODEL_FILES, cut_all, info, save_on_rank, tensors, written

WAIT_S = 60


def contents(whole: dict[str, Tensor], **changes: Any) -> Contents:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Contents(
        shards=cut_all(whole, rank, size),
        state={"position": 20},
        rank_state={"rank": rank, "generator": torch.tensor([rank])},
        info=info(world_size=size),
        model_files=MODEL_FILES,
        **changes,
    )


def save_and_change(folder: Path) -> None:
    """Three saves: each must hold what was there when it began."""
    saver, whole = Saver(), tensors()
    for name in ("a", "b", "c"):
        saver.save(folder / name, contents(whole), background=True)
        assert saver.pending == folder / name
        whole = {key: tensor.zero_() if name == "b" else tensor for key, tensor in whole.items()}
    saver.finish()
    assert saver.pending is None
    save_on_rank(folder / "now", whole)
    save_on_rank(folder / "then", tensors())


def test_they_hold_what_was_there_when_they_began(tmp_path: Path, world: Any) -> None:
    world(2)(save_and_change, tmp_path)
    assert written(tmp_path / "a") == written(tmp_path / "b") == written(tmp_path / "then")
    assert written(tmp_path / "c") == written(tmp_path / "now") != written(tmp_path / "then")
    assert checkpoint.open(tmp_path / "c").state == {"position": 20}


class Held:
    """Writing stops until `go`, as on a disk that is very slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = Saving.write

        def held(saving: Saving) -> None:
            assert self.go.wait(WAIT_S)
            write(saving)

        monkeypatch.setattr(Saving, "write", held)


def test_a_second_one_waits_and_says_so(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    saver, slow, store = Saver(), Held(monkeypatch), CheckpointStore(tmp_path)
    saver.save(store.path(20), contents(tensors()), background=True)
    saver.poll()
    assert saver.pending == store.path(20)
    assert store.steps() == [], "not there until it is complete"
    threading.Timer(0.2, slow.go.set).start()
    with caplog.at_level(logging.WARNING, "engines"):
        saver.save(store.path(30), contents(tensors()), background=True)
    assert store.steps() == [20], "complete before the second one began"
    assert re.search(rf"{store.path(30)} waited \d+\.\d s until {store.path(20)} was written", caplog.text)
    saver.finish()
    assert saver.pending is None


def poll_until_it_fails(folder: Path) -> str:
    """Rank 1 may write no more than 500 bytes; rank 0 has no trouble."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = Saver()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        saver.save(folder / "step-20", contents(tensors()), background=True)
        saver._thread.join(WAIT_S)
        with pytest.raises(CheckpointError) as caught:
            saver.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saver.pending is None
    saver.save(folder / "step-30", contents(tensors()), background=True)
    saver.finish()
    return str(caught.value)


def test_an_error_on_one_rank_comes_up_on_all(tmp_path: Path, world: Any) -> None:
    for message in world(2)(poll_until_it_fails, tmp_path):
        assert message.startswith(f"cannot save {tmp_path}/step-20: rank 1: ") and "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-30"]


def test_a_defect_of_the_thread_stays_a_defect(tmp_path: Path, monkeypatch: Any) -> None:
    def divide(saving: Saving) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Saving, "write", divide)
    saver = Saver()
    saver.save(tmp_path / "step-20", contents(tensors()), background=True)
    with pytest.raises(ZeroDivisionError):
        saver.finish()
    assert list(tmp_path.iterdir()) == []


def test_what_is_abandoned_never_appears(tmp_path: Path, monkeypatch: Any) -> None:
    saver, slow, store = Saver(), Held(monkeypatch), CheckpointStore(tmp_path)
    saver.save(store.path(20), contents(tensors()), background=True)
    saver.abandon()
    slow.go.set()
    saver._thread.join(WAIT_S)
    saver.finish()
    assert store.steps() == []
    assert "removed, a checkpoint that was never finished" in store.clean_up()[0]
