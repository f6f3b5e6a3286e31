"""The engines that are verified, and the one that they are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engines.discovery import Broken
from engines.errors import EnginesError
from engines.loading import load_config_class
from engines.registry import DENIED, HERE, IN_PROCESS, registry
from engines.selection import Selection
from engines.testing.layouts import Layout, declared_layouts
from engines.testing.reference import REFERENCE
from engines.testing.subject import Subject, resolve
from engines.verifying.results import Refusal

MODEL_TYPE = "language_model"
AT_LEAST = 3
"""Layouts of an engine, if it is parallel at all."""
SPARE = Layout("dp3", 3, {}, frozenset({"data_parallel"}))
"""For an engine that declares fewer."""


@dataclass(frozen=True)
class Contender:
    """An engine on its device."""

    name: str
    """As the table calls it: its backend, with the owner where two are verified."""
    subject: Subject
    named: bool = True
    """Whether somebody asked for it, or it was found."""

    @property
    def selection(self) -> Selection:
        """What the registry says of it."""
        return self.subject.selection

    def layouts(self) -> list[Layout]:
        """All that it declares, of four processes at most."""
        found = list(declared_layouts(self.subject.capabilities, self.subject.config))
        if len(found) < AT_LEAST and self.lacking(SPARE) == []:
            found.append(SPARE)
        return found

    def lacking(self, layout: Layout) -> list[str]:
        """The capabilities that a run at a layout needs, and the engine doesn't declare: weights are compared as it
        exports them.
        """
        return sorted((layout.needs | {"export"}) - self.subject.capabilities)


def find_contenders(words: Sequence[str], device: str | None) -> tuple[list[Contender], list[Refusal]]:
    """The engines with these names, or without names all that can run on `device`; with these, why others can't.

    Raises `EngineNotFound` for a name that fits none, `BrokenPlugin` for a named engine that can't be used.
    """
    if words:
        named = {one.selection.owner: one for one in (_contender(word, resolve(word, device)) for word in words)}
        return list(named.values()), []
    found: list[Contender] = []
    refusals: list[Refusal] = []
    for selection in _available(device or "cpu", refusals):
        try:
            found.append(_contender(selection.backend, selection, named=False))
        except EnginesError as error:
            refusals.append(Refusal(selection.backend, None, str(error)))
    return _told_apart(found), refusals


def find_baseline(word: str | None, device: str | None) -> Contender:
    """The engine with this name, or the reference engine, which is registered by now.

    Raises `EngineNotFound`, `BrokenPlugin`.
    """
    reference = str(REFERENCE["backend"])
    if word in (None, reference):
        return _contender(reference, resolve(f"{reference}@{IN_PROCESS}", str(REFERENCE["device"])))
    return _contender(word, resolve(word, device))


def _contender(name: str, selection: Selection, *, named: bool = True) -> Contender:
    is_reference = selection.engine == REFERENCE["engine"]
    setup = "engines.testing.reference:register" if is_reference else None
    return Contender(name, Subject(selection, load_config_class(selection), {}, setup), named)


def _available(device: str, refusals: list[Refusal]) -> Iterator[Selection]:
    for one in registry.candidates():
        if one.device != device or MODEL_TYPE not in one.model_types or one.manifest == HERE:
            continue
        state = registry.availability(one)
        if state.available:
            yield registry.resolve(MODEL_TYPE, f"{one.backend}@{one.distribution}", device)
        elif state.reason != DENIED:
            refusals.append(Refusal(one.backend, None, f"{state.reason}; {state.remedy}"))
    refusals += [
        Refusal(broken.entry_point, None, f"broken, {broken.cause}; {broken.remedy}")
        for broken in registry.broken()
        if _may_run_on(device, broken)
    ]


def _may_run_on(device: str, broken: Broken) -> bool:
    """Where the manifest can't be read, it may."""
    return broken.plugin is None or any(device in entry.device for entry in broken.plugin.manifest.engine)


def _told_apart(contenders: list[Contender]) -> list[Contender]:
    backends = Counter(one.name for one in contenders)
    return [
        one
        if backends[one.name] == 1
        else Contender(f"{one.name}@{one.selection.distribution}", one.subject, one.named)
        for one in contenders
    ]
