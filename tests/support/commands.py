"""`engines train` as a user runs it: real processes, on tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

START_WITHIN_S = 120
"""Imports of torch and transformers, on a machine that is busy."""


def recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write recipe.yaml: sft on `folder`/model and data.jsonl, fsdp2 on the CPU, with `sections` laid over it."""
    data: dict[str, Any] = {
        "recipe": "sft",
        "model": {"path": str(folder / "model")},
        "engine": {"strategy": "fsdp2", "device": "cpu"},
        "optimizer": {"lr": 1e-3},
        "data": {"train": str(folder / "data.jsonl")},
        "trainer": {"steps": 4, "mini_batch_size": 3, "output_dir": str(folder / "out")},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def write_jsonl(file: Path, records: Sequence[dict[str, Any]]) -> Path:
    """One record a line."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Every line of a file that may not exist yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_lines(file: Path) -> list[str]:
    """Every whole line of a file that is being written, or doesn't exist yet."""
    return file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []


class Command:
    """A command that runs; `engines train` unless `launcher` says otherwise."""

    def __init__(
        self,
        *arguments: str | Path,
        launcher: Sequence[str] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        words = launcher or (sys.executable, "-m", "engines")
        self.process = subprocess.Popen(
            [*words, "train", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )

    def finish(self, timeout_s: float = 2 * START_WITHIN_S) -> tuple[int, str]:
        """Exit code and all output; kills it, and fails, if it takes longer."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running: {self.process.communicate()[0]}") from None
        return self.process.returncode, output

    def ranks(self) -> list[int]:
        """Process ids of the children, in the order of their ranks."""
        return sorted(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == self.process.pid)

    def when(self, condition: Callable[[], bool], every_s: float = 0.02) -> None:
        """Wait until it holds, looking so often; fails with the output if the command ends before."""
        deadline = time.monotonic() + START_WITHIN_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"ended or took too long:\n{self.process.communicate()[0]}")
            time.sleep(every_s)


def run(*arguments: str | Path, cwd: Path | None = None) -> tuple[int, str]:
    """`engines train ...` to its end: exit code and all output."""
    return Command(*arguments, cwd=cwd).finish()


def alive(pid: int) -> bool:
    """Whether a process runs (or is stopped): it isn't gone, nor a zombie."""
    return _stat(str(pid))[:1] not in ([], ["Z"], ["X"])


def gone(pids: Sequence[int], within_s: float = 10) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder with its size and time of change; empty if there is none."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def _stat(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent(pid: str) -> int:
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0
