"""Curves of all runs of a model laid over each other, and how far apart they are; as SVG to be put into a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from typing import Any

from engines.verifying.numbers import Trained, relatives
from engines.verifying.results import Report, Row

INK, FAINT, BAND, ALARM = "#1f2933", "#9aa5b1", "#cbd2d9", "#dc2626"
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#db2777", "#0891b2")
"""Of engines, in the order of the table."""
FLOOR = 1e-9
"""Where equal values are drawn on the logarithmic scale: below anything that float32 can tell apart."""
LABEL_HEIGHT = 3.0
"""A line of text, as a factor on that scale."""
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 9.5,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
VALUES = (("losses", "loss", "Loss"), ("grad_norms", "grad_norm", "Gradient norm"))
"""What a run holds for each step, the tolerance for it, and its title."""


def draw(report: Report, model: str) -> str:
    """An `<svg>` for the runs of `model` that came to an end: values above, their relative differences below."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.model == model and row.trained is not None]
    # The salt names what one picture refers to within itself; pictures of a page must not share such names.
    with rc_context({**STYLE, "svg.hashsalt": model}):
        figure = Figure(figsize=(10, 5.4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(2, 2, sharex=True, gridspec_kw={"height_ratios": (1, 1.1)})
        for column, (name, tolerance, title) in enumerate(VALUES):
            _draw_values(axes[0][column], rows, report, model, name)
            axes[0][column].set_title(title, fontweight="bold")
            _draw_differences(axes[1][column], rows, report, model, name, getattr(rows[0].tolerance, tolerance))
        figure.legend(loc="outside upper right", ncols=8, frameon=False)
        with StringIO() as text:
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw_values(axes: Any, rows: Sequence[Row], report: Report, model: str, name: str) -> None:
    values = getattr(report.baselines[model], name)
    first = name == VALUES[0][0]  # one legend serves all
    axes.plot(
        _steps(values),
        values,
        color=BAND,
        linewidth=7,
        solid_capstyle="round",
        label=report.against if first else None,
    )
    colours = _colours(report)
    for place, (engine, colour) in enumerate(colours.items()):
        width = 1.2 + 1.3 * (len(colours) - 1 - place)  # so that all can be seen where they lie on each other
        mine = [row.trained for row in rows if row.engine == engine and row.trained is not None]
        for number, trained in enumerate(mine):
            label = f"{engine} at {len(mine)} layout{'s' if len(mine) > 1 else ''}" if first and not number else None
            found = getattr(trained, name)
            axes.plot(_steps(found), found, color=colour, linewidth=width, label=label, **_marks(found, 3 + width))
    _tidy(axes)


def _draw_differences(
    axes: Any, rows: Sequence[Row], report: Report, model: str, name: str, tolerance: float
) -> None:
    baseline = report.baselines[model]
    labels: list[tuple[float, str, str]] = []
    largest = tolerance
    for engine, colour in _colours(report).items():
        mine = [(row, _differences(row.trained, baseline, name)) for row in rows if row.engine == engine]
        for _, off in mine:
            axes.plot(_steps(off), off, color=colour, linewidth=1.2, alpha=0.75, **_marks(off, 3.5))
            largest = max(largest, *off)
        if mine:
            row, off = max(mine, key=lambda one: max(one[1]))
            labels.append((off[-1], row.layout, colour))
    _draw_labels(axes, labels, len(baseline.losses))
    axes.axhline(tolerance, color=ALARM, linewidth=1, linestyle=(0, (4, 3)))
    at = {"xycoords": ("axes fraction", "data"), "xytext": (2, 3), "textcoords": "offset points"}
    axes.annotate("tolerance", (0, tolerance), color=ALARM, fontsize=8, **at)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 2, largest * 8)
    axes.set_ylabel(f"relative difference from {report.against}", fontsize=8.5)
    axes.set_xlabel("step")
    _say_zero(axes)
    _tidy(axes)


def _draw_labels(axes: Any, labels: Sequence[tuple[float, str, str]], step: int) -> None:
    """Behind its end, the layout of the curve of each engine that goes highest; none on top of another."""
    lowest = 0.0
    for value, layout, colour in sorted(labels):
        at = max(value, lowest)
        lowest = at * LABEL_HEIGHT
        style = {"color": colour, "fontsize": 8, "va": "center", "annotation_clip": False}
        axes.annotate(layout, (step, at), xytext=(6, 0), textcoords="offset points", **style)


def _differences(trained: Trained | None, baseline: Trained, name: str) -> list[float]:
    assert trained is not None
    found = relatives(getattr(trained, name), getattr(baseline, name))
    return [max(value, FLOOR) if math.isfinite(value) else 1.0 for value in found]


def _say_zero(axes: Any) -> None:
    """The floor is where 0 is drawn, and is called so."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value < 2 * FLOOR else f"{value:.0e}"))


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=3)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.8)
    axes.margins(x=0.04, y=0.12)


def _marks(values: Sequence[float], size: float) -> dict[str, Any]:
    return {"marker": "o", "markersize": size} if len(values) <= 40 else {}


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _colours(report: Report) -> dict[str, str]:
    engines = dict.fromkeys(row.engine for row in report.rows)
    return {engine: COLOURS[number % len(COLOURS)] for number, engine in enumerate(engines)}
