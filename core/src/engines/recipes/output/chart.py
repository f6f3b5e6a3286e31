"""loss.png: the loss of each step, the trend through it, and the evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_INK, _FAINT, _TREND, _EVAL = "#1f2933", "#9aa5b1", "#2563eb", "#d97706"


def draw_loss(metrics: Sequence[dict[str, Any]], file: Path, *, title: str) -> None:
    """Draw the lines of metrics.jsonl; skipped steps leave gaps. Needs no display; the file is whole or as before."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    trained = [line for line in metrics if line.get("loss") is not None and not line.get("skipped_step")]
    if not trained:
        return
    steps, losses = [line["step"] for line in trained], [line["loss"] for line in trained]
    figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "o" if len(steps) <= 40 else ""
    axes.plot(steps, losses, color=_TREND, alpha=0.35, linewidth=1, marker=marker, markersize=3)
    axes.plot(steps, _trend(losses), color=_TREND, linewidth=2.2, solid_capstyle="round", label="training")
    evaluated = [line for line in metrics if line.get("eval_loss") is not None]
    if evaluated:
        axes.plot(
            [line["step"] for line in evaluated],
            [line["eval_loss"] for line in evaluated],
            color=_EVAL,
            linewidth=1.2,
            marker="D",
            markersize=4.5,
            label="evaluation",
        )
        axes.legend(frameon=False, labelcolor=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss per token", color=_INK)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, length=3)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.8)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    part = file.with_name(f".{file.name}")
    try:
        figure.savefig(part, format="png")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _trend(values: Sequence[float]) -> list[float]:
    """Exponential moving average, free of the bias of its beginning, over about a tenth of the run."""
    keep = 1 - 1 / max(2.0, len(values) / 10)
    trend, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        trend.append(total / weight)
    return trend
