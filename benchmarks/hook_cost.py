"""What a hook call through pluggy costs, against calling the method.

CPU times of interleaved rounds, the median of their differences per call, in microseconds: `forward_micro_batch`,
the hook with the most parameters, of an engine that does nothing, bare and with one and three wrappers around it.
Goal for the bare engine: at most 15 microseconds.

    python benchmarks/hook_cost.py [--rounds N] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

from engines.contract import BaseEngine, hookimpl
from engines.engine.binding import EnginePluginManager

GOAL_US = 15.0
CALLS = 2000
ARGUMENTS: dict[str, Any] = {"chunk": None, "chunk_index": 0, "index": 0, "micro_batch": None, "forward_only": False}


class Idle(BaseEngine):
    """Answers at once."""

    def __init__(self) -> None:
        pass

    def forward_micro_batch(
        self, chunk: Any, chunk_index: int, index: int, micro_batch: Any, forward_only: bool
    ) -> Any:
        return index


class Wrapper:
    """Does nothing around it."""

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Any, index: int, micro_batch: Any) -> Generator[None, Any, Any]:
        return (yield)


def hooked(engine: BaseEngine, wrappers: int) -> Callable[..., Any]:
    """The engine's hook, with so many wrappers around it."""
    manager = EnginePluginManager()
    manager.register(engine)
    for _ in range(wrappers):
        manager.register(Wrapper())
    return manager.hook.forward_micro_batch  # type: ignore[no-any-return]


def microseconds(call: Callable[..., Any]) -> float:
    """CPU time of one call, over many."""
    start = time.process_time_ns()
    for _ in range(CALLS):
        call(**ARGUMENTS)
    return (time.process_time_ns() - start) / 1000 / CALLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit code 1 if it costs more than is allowed")
    arguments = parser.parse_args()
    engine = Idle()
    ways = {"direct": engine.forward_micro_batch, **{f"{n} wrappers": hooked(engine, n) for n in (0, 1, 3)}}
    rounds = [{name: microseconds(call) for name, call in ways.items()} for _ in range(arguments.rounds)]
    print(f"{'forward_micro_batch':<22}{'us per call':>12}{'over direct':>12}")
    for name in ways:
        over = statistics.median(one[name] - one["direct"] for one in rounds)
        print(f"{name:<22}{statistics.median(one[name] for one in rounds):>12.2f}{over:>12.2f}")
    bare = statistics.median(one["0 wrappers"] - one["direct"] for one in rounds)
    print(f"goal: a hook costs at most {GOAL_US} us; it costs {bare:.2f}")
    return int(arguments.check and bare > GOAL_US)


if __name__ == "__main__":
    sys.exit(main())
