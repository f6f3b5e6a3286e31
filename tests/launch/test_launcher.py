"""The launcher with real processes that import no torch: who fails first, who stops, who is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.launch import Job
from engines.launch.exchange import Exchange
from engines.launch.processes import start_ranks

SUPPORT = Path(__file__).parent.parent / "support"
ENDS_WITHIN_S = 10


class Run:
    """A launcher under test, and the ranks that it started."""

    def __init__(self, target: str, folder: Path, num_ranks: int, timeout_s: float, cwd: Path) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.process = subprocess.Popen(
            [sys.executable, SUPPORT / "run_job.py", f"jobs:{target}", str(num_ranks), str(timeout_s), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        )

    def said(self, rank: int) -> str:
        file = self.folder / str(rank)
        return file.read_text() if file.exists() else ""

    def started(self) -> list[int]:
        """Wait until every rank runs; their process ids."""
        wait_for(lambda: all(self.said(rank) for rank in range(self.num_ranks)))
        return [int(self.said(rank)) for rank in range(self.num_ranks)]

    def finish(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error


def wait_for(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(target: str, num_ranks: int = 2, timeout_s: float = 60, cwd: Path = tmp_path) -> Run:
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        runs.append(Run(target, folder, num_ranks, timeout_s, cwd))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()


Start = Callable[..., Run]


def test_each_rank_knows_its_place(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = start("report", num_ranks=3)
    assert run.finish() == (0, "")
    worlds = [json.loads(run.said(rank)) for rank in range(3)]
    assert [world["rank"] for world in worlds] == [0, 1, 2]
    assert [world["LOCAL_RANK"] for world in worlds] == ["0", "1", "2"]
    assert {world["WORLD_SIZE"] for world in worlds} == {"3"} == {world["LOCAL_WORLD_SIZE"] for world in worlds}
    assert all(world["own_session"] for world in worlds), "Ctrl-C would reach ranks before the launcher"
    assert {world["OMP_NUM_THREADS"] for world in worlds} == {str(max(1, len(os.sched_getaffinity(0)) // 3))}
    assert len({world["ENGINES_RENDEZVOUS"] for world in worlds}) == 1
    assert worlds[0]["ENGINES_RENDEZVOUS"].startswith("file:///")


def test_the_user_decides_on_threads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run = start("report", num_ranks=1)
    assert run.finish() == (0, "")
    assert json.loads(run.said(0))["OMP_NUM_THREADS"] == "7"


def test_a_folder_in_the_working_directory_shadows_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "__init__.py").write_text("raise SystemExit('shadowed')")
    assert start("report", num_ranks=1, cwd=tmp_path).finish() == (0, "")


FAILURES = {
    "defect": (1, ["Error: rank 1 failed: KeyError: 'boom'", "Traceback", "jobs.py"]),
    "mend": (2, ["MEND data.jsonl, line 3: broken\nMend it.\n"]),
    "diverge": (1, ["Error: the loss was never finite\n"]),
    "consequence": (1, ["Error: rank 1 failed: ValueError: the cause"]),
    "killed": (1, ["Error: rank 1 was ended by SIGKILL; the system may have run out of memory", "last words"]),
    "hoards": (1, ["Error: rank 1 ran out of memory (hoarding): MemoryError", "Smaller micro-batches"]),
    "aborts": (1, ["Error: rank 1 ran out of memory: rank 1 was ended by SIGABRT", "std::bad_alloc"]),
    "leaves": (1, ["Error: rank 1 ended with exit code 7 and said nothing", "usage: some library"]),
}


@pytest.mark.parametrize("target", FAILURES)
def test_one_rank_failing_ends_all_and_is_named_once(target: str, start: Start) -> None:
    code, words = FAILURES[target]
    began = time.monotonic()
    returncode, error = start(target).finish()
    assert returncode == code
    assert error.startswith(words[0])
    assert error.count(words[0]) == 1
    for word in words:
        assert word in error
    assert time.monotonic() - began < ENDS_WITHIN_S
    if target in ("mend", "diverge", "hoards"):
        assert "Traceback" not in error


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_lets_every_rank_finish_its_step(name: str, start: Start) -> None:
    signum = signal.Signals[name]
    run = start("steps")
    run.started()
    run.process.send_signal(signum)
    said = f"{name}: the run stops after this step; a second one ends it at once\n"
    assert run.finish() == (128 + signum, said)
    assert [run.said(rank) for rank in (0, 1)] == [f"stopped by {int(signum)}"] * 2


def test_a_signal_that_comes_before_a_rank_listens_waits_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    for signum in (signal.SIGINT, signal.SIGTERM):
        for rank in start_ranks(Job("jobs:steps", {"folder": str(tmp_path)}, 1, 60), Exchange(tmp_path)):
            rank.send(signum)
            assert rank.process.wait(timeout=30) == 128 + signum


def test_a_rank_that_dies_after_a_first_signal_is_named(start: Start) -> None:
    run = start("deaf")
    pids = run.started()
    run.process.send_signal(signal.SIGTERM)
    os.kill(pids[1], signal.SIGKILL)
    code, error = run.finish()
    assert code == 1
    assert "\nError: rank 1 was ended by SIGKILL" in error


def test_a_second_signal_ends_ranks_that_do_not_listen(start: Start) -> None:
    run = start("deaf")
    pids = run.started()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    run.process.send_signal(signal.SIGINT)
    code, error = run.finish()
    assert code == 130
    assert error.endswith("\nError: the run was ended at once by a second SIGINT; what was saved stays\n")
    assert not any(alive(pid) for pid in pids)


def test_a_stopped_rank_ends_the_run_and_is_named(start: Start) -> None:
    run = start("steps", timeout_s=2)
    pids = run.started()
    os.kill(pids[1], signal.SIGSTOP)
    code, error = run.finish()
    assert code == 1
    assert error.startswith("Error: rank 1 has shown no sign of life for 2 s, since step ")
    assert "somebody stopped its process (SIGSTOP)" in error
    assert "rank 0" not in error
    assert not any(alive(pid) for pid in pids)


def test_no_rank_outlives_a_launcher_that_is_killed(start: Start, tmp_path: Path, monkeypatch: Any) -> None:
    """Nor does its folder the next launch, which leaves that of a run alone."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    run, other = start("deaf", num_ranks=3), start("steps", num_ranks=1)
    pids = run.started()
    other.started()
    run.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), within_s=ENDS_WITHIN_S)
    assert len(list((tmp_path / "temporary").iterdir())) == 2
    assert start("report", num_ranks=1).finish() == (0, "")
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    other.process.send_signal(signal.SIGTERM)
    assert other.finish()[0] == 143
    assert list((tmp_path / "temporary").iterdir()) == []
