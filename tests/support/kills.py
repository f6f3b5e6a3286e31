"""A run that is killed again and again at random moments, in and out of saving, and still loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engines.cli.main import main
from engines.durable import TEMPORARY
from engines.recipes.output.folder import OutputFolder
from support.commands import Command, gone, read_jsonl, read_lines

EXACT: Final = ("step", "loss", "grad_norm", "lr", "tokens", "targets", "skipped_step", "eval_loss")
"""What must be equal to the bit between an interrupted run and one that was left alone."""
STEPS_PER_KILL: Final = 8
"""A killed run does fewer, also on a fast machine."""
_LONGEST_S: Final = 0.03
"""A save of a tiny model takes longer; the moment within it, or outside, is drawn."""


def exact(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of each step, without times."""
    return [{name: line.get(name) for name in EXACT} for line in read_jsonl(out / "metrics.jsonl")]


def export(out: Path) -> dict[str, bytes]:
    """The exported model's files."""
    return {path.name: path.read_bytes() for path in sorted((out / "export").iterdir())}


def kill_seed() -> int:
    """KILL_SEED, or another one each time."""
    return int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(10**6))


@dataclass
class Killer:
    """Starts a run and kills some of its processes by SIGKILL, as often as asked, and looks at what is left."""

    arguments: Sequence[str | Path]
    """Of `engines train`; each run saves after every step, some of them in the background."""
    out: Path
    seed: int
    history: list[str] = field(default_factory=list)
    """What was done, for messages."""
    within: int = 0
    """How many kills hit a save."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def kill(self) -> None:
        """One run: it goes on from the last checkpoint, is killed, and leaves only what is whole."""
        before, written = self._steps(), self._written()
        background = self._draw.random() < 0.5
        command = Command(*self.arguments, "trainer.save_every=1", f"trainer.async_save={background}".lower())
        reached = max(before, default=0) + self._draw.randint(1, 2)
        saving = self._draw.random() < 0.5
        # lines behind the last checkpoint are there until the run begins to write: it cuts them off
        command.when(lambda: self._written() != written and len(self._lines()) >= reached, every_s=0.002)
        ranks = command.ranks()
        victims = {
            "rank 0": ranks[:1],
            "rank 1": ranks[1:],
            "the launcher": [command.process.pid],
            "all ranks": ranks,
            "everything": [command.process.pid, *ranks],
        }
        victim = self._draw.choice(sorted(victims))
        self.history.append(f"step {reached}, async_save {background}, in a save {saving}: {victim}")
        if saving:
            command.when(self._is_saving, every_s=0.001)
        time.sleep(self._draw.uniform(0, _LONGEST_S))
        complete = self._steps()
        for pid in victims[victim]:
            with suppress(ProcessLookupError):  # a rank is gone as soon as its launcher is
                os.kill(pid, signal.SIGKILL)
        output = command.finish(timeout_s=60)[1]
        assert gone(ranks), self.say(f"a rank outlived {victim}")
        self.within += self._is_saving()
        self._check(before, complete, output, is_said=command.process.pid not in victims[victim])

    def say(self, fault: str) -> str:
        """A message that lets the same kills be drawn again."""
        return "\n".join([f"{fault}; KILL_SEED={self.seed}, kills so far:", *self.history])

    def check_end(self, undisturbed: Path) -> None:
        """After the run that nobody killed: the same numbers and the same model, to the bit."""
        assert exact(self.out) == exact(undisturbed), self.say("other numbers")
        assert export(self.out) == export(undisturbed), self.say("another model")
        print(f"{len(self.history)} kills, {self.within} of them in a save, KILL_SEED={self.seed}")

    def _check(self, before: list[int], complete: list[int], output: str, *, is_said: bool) -> None:
        start = max(before, default=0)
        if start:
            assert f"going on from {self.out}/checkpoints/step-{start}\n" in output, self.say(output)
        if is_said:
            assert "was ended by SIGKILL" in output and output.count("Error: ") == 1, self.say(output)
        left = self._steps()
        latest = max(left, default=0)
        assert latest >= max(complete, default=0), self.say(f"{complete} were complete, now {left} are")
        assert main(["checkpoint", "verify", str(self.out)]) == 0, self.say("a checkpoint is damaged")
        steps = [json.loads(line)["step"] for line in self._lines()]
        assert steps == list(range(1, len(steps) + 1)), self.say(f"steps {steps}")
        assert len(steps) >= latest, self.say(f"{len(steps)} lines, but a checkpoint of step {latest}")

    def _steps(self) -> list[int]:
        return OutputFolder(self.out).steps()

    def _lines(self) -> list[str]:
        return read_lines(self.out / "metrics.jsonl")

    def _written(self) -> int:
        """When metrics.jsonl was changed."""
        file = self.out / "metrics.jsonl"
        return file.stat().st_mtime_ns if file.exists() else 0

    def _is_saving(self) -> bool:
        folder = self.out / "checkpoints"
        return folder.is_dir() and any(TEMPORARY.fullmatch(name) for name in os.listdir(folder))
