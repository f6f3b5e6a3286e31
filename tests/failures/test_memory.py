"""A rank that runs out of memory, under a real limit set from outside."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from support.commands import Command, gone, read_lines, recipe, write_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")

SHORT, LONG = 600, 60
"""Samples of a few tokens, which train while the limit is set, and then ones that don't fit below it."""
LITTLE = 8 * 2**20


@pytest.mark.more
def test_a_rank_out_of_memory_is_named_first(work: Path) -> None:
    """Its address space may grow no more; the step that needs more ends the run, and says why in one message."""
    records = [{"input_ids": [1, 2, 3]}] * SHORT + [{"input_ids": [k % 256 for k in range(250)]}] * LONG
    write_jsonl(work / "data.jsonl", records)
    trainer = {"steps": (SHORT + LONG) // 10, "mini_batch_size": 10, "shuffle": False}
    out = work / "out"
    command = Command(recipe(work, trainer=trainer, launch={"nproc": 2, "timeout_s": 100}))
    command.when(lambda: len(read_lines(out / "metrics.jsonl")) >= 1)
    ranks = command.ranks()
    limit_to(ranks[1], address_space(ranks[1]) + LITTLE)
    code, output = command.finish()
    assert code == 1
    assert "Error: rank 1 ran out of memory (step 61): " in output
    assert output.count("\nError: ") == 1 and "Traceback" not in output, "one message"
    assert len(read_lines(out / "metrics.jsonl")) == SHORT // 10
    assert gone(ranks, within_s=0)


def address_space(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def limit_to(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
