"""A disk that is full, a permission that is lost, a folder that goes: while a run saves, one after another."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.cli.main import main
from engines.recipes.output.folder import OutputFolder
from engines.recipes.output.metrics import MetricsFile, read_metrics
from support.commands import Command, read_lines, recipe, run
from support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tmpfs, prlimit and capabilities are Linux's")

UNPRIVILEGED = (sys.executable, str(Path(__file__).parent.parent / "support/unprivileged.py"))
"""Before a command: permissions apply to it."""


@pytest.fixture
def disk(work: Path) -> Iterator[SmallDisk]:
    """The disk of the run's checkpoints; the rest of its output lies elsewhere."""
    with small_disk(work / "disk") as disk:
        (disk.path / "checkpoints").mkdir()
        (work / "out").mkdir()
        (work / "out" / "checkpoints").symlink_to(disk.path / "checkpoints")
        yield disk


def test_a_line_of_metrics_without_room_is_not_begun(tmp_path: Path) -> None:
    line = "x" * 2**17
    with small_disk(tmp_path / "disk") as disk:
        metrics = MetricsFile(disk.path / "metrics.jsonl", steps_done=0)
        metrics.append({"step": 1})
        disk.fill([os.getpid()])
        try:
            with pytest.raises(OSError, match=disk.full):
                metrics.append({"step": 2, "line": line})
        finally:
            disk.make_room([os.getpid()])
        assert read_lines(disk.path / "metrics.jsonl") == ['{"step": 1}']
        metrics.append({"step": 2})
        metrics.close()
        assert [line["step"] for line in read_metrics(disk.path / "metrics.jsonl")] == [1, 2]


@pytest.mark.more
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_run_that_goes_on_without_checkpoints(work: Path, disk: SmallDisk, background: bool) -> None:
    """With on_save_error=continue: each save that fails is said and leaves nothing; the first that can succeeds."""
    out = work / "out"
    trainer = {"steps": 10_000, "save_every": 1, "keep": 2, "on_save_error": "continue", "async_save": background}
    file = recipe(work, trainer=trainer, launch={"nproc": 2, "timeout_s": 100})
    command = Command(file, launcher=(*UNPRIVILEGED, sys.executable, "-m", "engines"))

    def latest() -> int:
        return max(OutputFolder(out).steps(), default=0)

    def lines() -> int:
        return len(read_lines(out / "metrics.jsonl"))

    def survives(breaks: Callable[[], object], mends: Callable[[], object]) -> None:
        breaks()
        done = lines()
        command.when(lambda: lines() >= done + 3)
        mends()
        saved = latest()
        command.when(lambda: latest() > saved)

    command.when(lambda: latest() > 0)
    ranks, folder = command.ranks(), disk.path / "checkpoints"
    survives(lambda: folder.rename(disk.path / "away"), folder.mkdir)
    survives(lambda: disk.fill(ranks), lambda: disk.make_room(ranks))
    survives(lambda: folder.chmod(0o500), lambda: folder.chmod(0o700))
    command.process.send_signal(signal.SIGTERM)
    code, output = command.finish()
    assert code == 143, output
    for reason in (disk.full, "Permission denied", "File exists"):
        said = [line for line in output.splitlines() if reason in line]
        assert said and all(line.startswith("cannot ") for line in said), output
        assert all(line.endswith("; the run goes on (trainer.on_save_error)") for line in said), output
    assert f"stopped after step {lines()}; step {lines()} is the last one saved, and" in output
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"step-{n}" for n in OutputFolder(out).steps())
    assert main(["checkpoint", "verify", str(out)]) == 0


@pytest.mark.more
def test_a_run_that_stops_without_room_and_goes_on_with_it(work: Path, disk: SmallDisk) -> None:
    """By default: exit code 2, the cause, what is saved; and then the same command, as if nothing had been."""
    out = work / "out"
    trainer = {"steps": 10_000, "save_every": 1, "keep": 2, "async_save": True}
    file = recipe(work, trainer=trainer, launch={"nproc": 2, "timeout_s": 100})
    command = Command(file)
    command.when(lambda: OutputFolder(out).steps() != [])
    disk.fill(command.ranks())
    code, output = command.finish()
    assert code == 2, output
    last = OutputFolder(out).steps()[-1]
    assert f"Error: cannot save {out}/checkpoints/step-{last + 1}: rank " in output
    assert f"{disk.full}: '{out}/checkpoints/.step-{last + 1}.tmp-" in output, "the file"
    assert output.endswith(f"Step {last} is the last one saved. Mend it, and the same command goes on from there.\n")
    assert output.count("Error: ") == 1 and "Traceback" not in output
    left = {path.name for path in (disk.path / "checkpoints").iterdir()}
    assert left == {f"step-{step}" for step in OutputFolder(out).steps()}
    assert main(["checkpoint", "verify", str(out)]) == 0

    disk.make_room([])
    code, output = run(file, f"trainer.steps={last + 2}")
    assert code == 0, output
    assert f"going on from {out}/checkpoints/step-{last}\n" in output
    assert len(read_lines(out / "metrics.jsonl")) == last + 2
