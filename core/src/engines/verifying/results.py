"""What a verification found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.verifying.numbers import Numbers, Trained


@dataclass(frozen=True)
class Refusal:
    """What an engine doesn't run, by its own word."""

    engine: str
    layout: str | None
    """None: it can't run at all."""
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The object below `refused`."""
        return {"engine": self.engine, "layout": self.layout, "reason": self.reason}


def in_words(refusals: Iterable[Refusal]) -> Iterator[str]:
    """Each reason of an engine once, with the layouts that it is given for."""
    layouts: dict[tuple[str, str], list[str]] = {}
    for one in refusals:
        layouts.setdefault((one.engine, one.reason), []).extend([one.layout] if one.layout else [])
    for (engine, reason), names in layouts.items():
        where = f" at {', '.join(names)}" if names else ""
        yield f"{engine}{where}: {_on_a_line(reason)}"


def _on_a_line(text: str) -> str:
    """Lines are sentences, also where they end without a full stop."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " ".join([*(line if line[-1] in ".:;," else f"{line}." for line in lines[:-1]), *lines[-1:]])


@dataclass(frozen=True)
class Row:
    """A run of an engine at a layout, held against another engine's."""

    engine: str
    layout: str
    model: str
    tolerance: Numbers
    seconds: float = 0.0
    """As rank 0 counts them, from the engine's construction to the last comparison; until it failed, if it did."""
    differences: Numbers | None = None
    """None if the run failed."""
    trained: Trained | None = None
    causes: Sequence[str] = ()
    """Why it failed, or what is wrong that isn't a matter of tolerance."""

    @property
    def passed(self) -> bool:
        """Whether the engine has trained the same model."""
        return not self.causes and self.differences is not None and all(self.verdicts().values())

    def verdicts(self) -> dict[str, bool]:
        """Of each number, whether it is within its tolerance."""
        return self.differences.within(self.tolerance) if self.differences is not None else {}

    def as_json(self) -> dict[str, Any]:
        """The object below `results`."""
        numbers = self.differences or Numbers(*[float("inf")] * 4)
        return {
            "engine": self.engine,
            "layout": self.layout,
            **numbers.as_json(),
            "tolerance": self.tolerance.as_json(),
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "causes": list(self.causes),
        }


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    against: str
    """The engine that all are compared with."""
    steps: int
    tolerances: Numbers
    rows: Sequence[Row]
    refusals: Sequence[Refusal]
    baselines: Mapping[str, Trained]
    """Its runs, by model."""
    versions: Mapping[str, str]
    """Of the distributions that decide the numbers."""

    @property
    def passed(self) -> bool:
        """Whether every run was, and passed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "passed": self.passed,
            "tolerances": self.tolerances.as_json(),
            "against": self.against,
            "steps": self.steps,
            "results": [row.as_json() for row in self.rows],
            "refused": [refusal.as_json() for refusal in self.refusals],
        }
