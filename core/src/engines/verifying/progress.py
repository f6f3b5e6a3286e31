"""What can be seen of a verification while it runs, on standard error: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.verifying.plan import Run
from engines.verifying.results import Refusal, Row


class Progress:
    """The way through the runs."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._done = self._total = 0

    @contextmanager
    def of(self, total: int) -> Iterator[None]:
        """Until the last of `total` runs is done, or something ends them."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._total = total
        if not self._console.is_terminal:
            yield
            return
        columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._bar.add_task("", total=total)
            yield

    def begin(self, run: Run) -> None:
        """A run begins."""
        if self._bar is not None:
            self._bar.update(0, description=f"{run.engine.name} at {run.layout}")

    def end(self, result: Row | Refusal) -> None:
        """It is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(0, completed=self._done)
            return
        self._console.print(f"{self._done}/{self._total}  {result.engine} at {result.layout}: {_said(result)}")


def _said(result: Row | Refusal) -> str:
    if isinstance(result, Refusal):
        return "refused"
    return f"{'passed' if result.passed else 'FAILED'} in {result.seconds:.1f} s"
