"""A run as one sees it pass: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

_LINE_EVERY_S = 2.0


class Progress(Protocol):
    """What the loop tells its watcher."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def make_progress(total_steps: int, steps_done: int) -> Progress:
    """The one that suits standard output."""
    return Bar(total_steps, steps_done) if sys.stdout.isatty() else Lines(total_steps, steps_done)


class Bar:
    """rich's progress bar with the figures of the last step beside it; fits 80 columns."""

    def __init__(self, total_steps: int, steps_done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            expand=True,
            speed_estimate_period=600,  # rich's own, 30 s, forgets the step before where steps are slow
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=steps_done, figures="")
        self._bar.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Move the bar; a loss of evaluation stays above it, as there is no room beside it on 80 columns."""
        if metrics.get("eval_loss") is not None:
            self.note(f"step {step}: eval loss {metrics['eval_loss']:.4f}")
        self._bar.update(self._task, completed=step, figures=_figures({**metrics, "eval_loss": None}, short=True))

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()


class Lines:
    """A line every two seconds at most, and one for the last step."""

    def __init__(self, total_steps: int, steps_done: int) -> None:
        self._total = total_steps
        self._first = steps_done
        self._began = time.monotonic()
        self._printed = -_LINE_EVERY_S

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the step's figures, if it's time."""
        now = time.monotonic()
        if now - self._printed < _LINE_EVERY_S and step < self._total:
            return
        self._printed = now
        left = (now - self._began) / (step - self._first) * (self._total - step)
        print(f"step {step}/{self._total}  {_figures(metrics)}  {_clock(left)} left", flush=True)

    def note(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing is open."""


def _figures(metrics: Mapping[str, Any], *, short: bool = False) -> str:
    loss = f"{metrics['loss']:.4f}"
    figures = [
        f"loss [bold cyan]{loss}[/]" if short else f"loss {loss}",
        f"lr {metrics['lr']:.3g}",
        f"grad norm {metrics['grad_norm']:.3g}",
        f"{metrics['tokens_per_second']:,.0f} {'tok/s' if short else 'tokens/s'}",
    ]
    if metrics.get("eval_loss") is not None:
        figures.insert(1, f"eval loss {metrics['eval_loss']:.4f}")
    if metrics.get("skip_reason"):
        figures.append(f"skipped ({str(metrics['skip_reason']).replace('_', '-')})")
    return "  ".join(figures)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
