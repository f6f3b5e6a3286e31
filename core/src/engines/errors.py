"""Errors that a user, not a programmer, must mend.

    EnginesError(ValueError)       exit code 2: one clear message, no traceback
    |-- EngineNotFound             no installed engine fits what was asked
    |-- BrokenPlugin               an installed distribution cannot be used: who, where, why, what to do
    |-- ConfigError                a recipe or setting is wrong
    |   `-- CapabilityError        a setting asks for what the chosen engine does not declare
    |-- ContractError              an engine's author broke the contract: a hook missing, misspelt or with defaults
    |-- BatchError                 a batch that contradicts itself
    |-- DataError                  training data that cannot be read or used
    |-- CheckpointError            a checkpoint that is incomplete, damaged or of something else
    |-- LaunchError                processes, environment or devices do not allow what was asked
    `-- ModelError                 a model folder that cannot be loaded

Every other exception is a defect of the program and ends a command with exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class EnginesError(ValueError):
    """What the user must mend; `str()` is the whole message, `remedy` (if any) on a line of its own."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class EngineNotFound(EnginesError):
    """No installed engine fits what was asked. The message holds every candidate and why it was left.

    `trace` holds the same as `engines.selection.Consideration` records.
    """

    def __init__(self, message: str, remedy: str | None = None, trace: Sequence[Any] = ()) -> None:
        super().__init__(message, remedy)
        self.args = (message, remedy, trace)
        self.trace = tuple(trace)


class BrokenPlugin(EnginesError):
    """An installed distribution declares an engine that cannot be used. The message is one line."""

    def __init__(self, distribution: str, entry_point: str, file: str, cause: str, remedy: str) -> None:
        super().__init__(f'{distribution}: entry point "{entry_point}", {file}: {cause}', remedy)
        self.args = (distribution, entry_point, file, cause, remedy)  # what unpickling passes to __init__
        self.distribution = distribution
        self.entry_point = entry_point
        self.file = file
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class ConfigError(EnginesError):
    """A recipe or a setting is wrong."""


class CapabilityError(ConfigError):
    """A setting asks for what the chosen engine does not declare."""


class ContractError(EnginesError):
    """An engine's class does not keep the contract. Raised when the engine is bound or built, before it runs."""


class BatchError(EnginesError):
    """A batch whose fields contradict each other or lack what a loss reads."""


class DataError(EnginesError):
    """Training data that cannot be read or used; names file and line."""


class CheckpointError(EnginesError):
    """A checkpoint that is incomplete, damaged, or of another model or engine."""


class LaunchError(EnginesError):
    """Processes, environment variables or devices do not allow what was asked."""


class ModelError(EnginesError):
    """A model folder that cannot be loaded: weights missing, unknown architecture, truncated files."""


NO_URLS = "Files are read in parts and folders are renamed, which object stores can't; mount it, or copy it to a disk"
"""Why a path is no URL, and what to do."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean "x"?` for the closest of `choices`, or an empty string: to be put behind a sentence."""
    import difflib

    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f' Did you mean "{by_lower[close[0]]}"?' if close else ""
