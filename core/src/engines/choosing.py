"""The choice of one engine: the device first, then the owner on that device.

**Device**: the one that was named (as an argument, by `ENGINES_DEVICE`, or in the configuration, in this order), else
the highest-ranked one that is present and that any candidate supports. **Owner**: `backend@distribution` if written so,
else the highest priority among those available on that device, else an error that names both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.availability import availability
from engines.devices import DEVICE_VARIABLE, DeviceSpec, check_known, named_device, presence
from engines.discovery import Broken
from engines.errors import EngineNotFound, did_you_mean
from engines.selection import Availability, Candidate, Consideration, Selection

PUBLISHED = {"fsdp2": "engines-fsdp"}
"""Backends that this project publishes: what to install for one that is not."""


@dataclass(frozen=True)
class Field:
    """Everything that a choice is made from."""

    candidates: Sequence[Candidate]
    broken: Sequence[Broken]
    devices: Mapping[str, DeviceSpec]
    denied: frozenset[str] = frozenset()
    """Ids of plugins that the deny list names."""


@dataclass(frozen=True)
class Asked:
    """What somebody asks for."""

    model_type: str
    backend: str | None
    owner: str | None
    device: str | None
    device_by: str
    """Who named the device."""

    def __str__(self) -> str:
        backend = "any backend" if self.backend is None else f'backend "{self.backend}"'
        owner = f" of {self.owner}" if self.owner else ""
        device = f' on device "{self.device}" ({self.device_by})' if self.device else ""
        return f"{self.model_type} with {backend}{owner}{device}"


def ask(model_type: str, backend: str | None, device: str | None, configured: str | None) -> Asked:
    """Put a request into words: split `backend@distribution`, and find who names the device."""
    word, _, owner = (backend or "").partition("@")
    by, name = next(
        (
            (by, name)
            for by, name in (
                ("the argument", device),
                (DEVICE_VARIABLE, named_device()),
                ("the configuration", configured),
            )
            if name
        ),
        ("", None),
    )
    return Asked(model_type, word or None, owner or None, name, by)


def choose(asked: Asked, field: Field) -> Selection:
    """The one engine that is meant. Raises EngineNotFound with every candidate and why it was left."""
    if asked.device is not None:
        check_known(asked.device, field.devices, asked.device_by)
    named = [one for one in field.candidates if asked.backend in (None, one.backend)]
    fitting = [one for one in named if asked.model_type in one.model_types and _owned(one, asked.owner)]
    fitting = [one for one in fitting if one.plugin not in field.denied]
    trace = _Trace(asked, field, named)
    if not fitting:
        raise trace.error(_nothing_fits(asked, field, named))
    device, device_reason = _device(asked, fitting, field.devices)
    here = [one for one in fitting if one.device == device]
    if not here:
        supported = ", ".join(sorted({one.device for one in fitting}))
        raise trace.error(f"No engine for {asked}: it runs on {supported}.")
    states = {one: availability(one, field.devices) for one in here}
    trace.judge(device, states)
    available = [one for one in here if states[one].available]
    if not available:
        remedy = next((state.remedy for state in states.values() if state.remedy), None)
        raise trace.error(f"No engine for {asked} can run here.", remedy)
    highest = max(one.priority for one in available)
    best = [one for one in available if one.priority == highest]
    if len(best) > 1:
        raise trace.error(
            f"{asked.model_type} on {device} has several owners of equal priority {highest}.", _tie(best)
        )
    trace.take(best[0], len(available))
    return select(best[0], asked.model_type, field.devices[device], device_reason, trace.lines())


def _owned(candidate: Candidate, owner: str | None) -> bool:
    return owner is None or _plain(candidate.distribution) == _plain(owner)


def _plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def _device(asked: Asked, fitting: Sequence[Candidate], devices: Mapping[str, DeviceSpec]) -> tuple[str, str]:
    if asked.device is not None:
        return asked.device, f"named by {asked.device_by}"
    supported = {one.device for one in fitting} & devices.keys()
    ranked = sorted((devices[name] for name in supported), key=lambda spec: (-spec.rank, spec.name))
    for spec in ranked:
        found = presence(spec)
        if found.present:
            return spec.name, f"the highest-ranked one that is supported and present ({found.how})"
    first = ranked[0].name if ranked else fitting[0].device
    return first, "none that is supported is present"


def _nothing_fits(asked: Asked, field: Field, named: Sequence[Candidate]) -> str:
    """Why no candidate is even of the right kind."""
    installed = sorted({one.backend for one in field.candidates})
    if not named:
        said = (
            f'No installed engine has the backend "{asked.backend}".' if asked.backend else "No engine is installed."
        )
        said += did_you_mean(asked.backend or "", installed)
        if installed:
            said += f" Installed: {', '.join(installed)}."
        if asked.backend in PUBLISHED:
            said += f" It comes with: pip install {PUBLISHED[asked.backend]}."
        return said
    allowed = [one for one in named if one.plugin not in field.denied]
    if not allowed:
        return f"No engine for {asked}: the deny list leaves none."
    if asked.owner is not None and not any(_owned(one, asked.owner) for one in allowed):
        owners = sorted({one.distribution for one in allowed})
        said = f'No engine for {asked}: "{asked.owner}" does not own it.{did_you_mean(asked.owner, owners)}'
        return f"{said} Owners: {', '.join(owners)}."
    known = sorted({model_type for one in allowed for model_type in one.model_types})
    return f"No engine for {asked}: it makes {', '.join(known)}.{did_you_mean(asked.model_type, known)}"


def _tie(best: Sequence[Candidate]) -> str:
    """What settles a tie."""
    spelt = sorted({f"{one.backend}@{one.distribution}" for one in best})
    if len(spelt) == 1:
        return "Give one of them a higher priority."
    return f"Write {' or '.join(spelt)}, or put one of {', '.join(sorted({one.plugin for one in best}))} in ENGINES_DENY."


class _Trace:
    """Every candidate of a choice, and why it is taken or left."""

    def __init__(self, asked: Asked, field: Field, named: Sequence[Candidate]) -> None:
        self.asked = asked
        self.denied = field.denied
        self.devices = field.devices
        self.named = named
        self.broken = [one for one in field.broken if self._may_be_meant(one)]
        self.device: str | None = None
        self.states: Mapping[Candidate, Availability] = {}
        self.taken: Candidate | None = None
        self.rivals = 0

    def judge(self, device: str, states: Mapping[Candidate, Availability]) -> None:
        self.device = device
        self.states = states

    def take(self, candidate: Candidate, rivals: int) -> None:
        self.taken = candidate
        self.rivals = rivals

    def lines(self) -> tuple[Consideration, ...]:
        order = sorted(self.named, key=lambda one: (one is not self.taken, one.backend, one.device, -one.priority))
        lines = [self._line(one) for one in order]
        for one in self.broken:
            lines.append(
                Consideration(
                    one.entry_point,
                    "",
                    one.distribution,
                    one.version,
                    None,
                    False,
                    f"broken, {one.cause}",
                    one.remedy,
                )
            )
        return tuple(lines)

    def error(self, said: str, remedy: str | None = None) -> EngineNotFound:
        lines = self.lines()
        if lines:
            said += "\n" + "\n".join(f"  {line}" for line in lines)
        return EngineNotFound(said, remedy or "`engines list --all` shows what is installed.", lines)

    def _may_be_meant(self, broken: Broken) -> bool:
        """A broken plugin whose manifest can be read is meant if it has the backend; any other may be."""
        if broken.plugin is None or self.asked.backend is None:
            return True
        return any(self.asked.backend in entry.backend for entry in broken.plugin.manifest.engine)

    def _line(self, one: Candidate) -> Consideration:
        reason, remedy = self._why(one)
        return Consideration(
            one.backend,
            one.device,
            one.distribution,
            one.version,
            one.priority,
            one is self.taken,
            reason,
            remedy,
        )

    def _why(self, one: Candidate) -> tuple[str, str]:
        if one is self.taken:
            among = f", the highest of {self.rivals} available" if self.rivals > 1 else ""
            return f"priority {one.priority}{among}", ""
        if one.plugin in self.denied:
            return "denied", ""
        if self.asked.model_type not in one.model_types:
            return f"makes {', '.join(one.model_types)}", ""
        if not _owned(one, self.asked.owner):
            return f"{self.asked.owner} was asked for", ""
        state = self.states.get(one)
        if state is not None and state.available:
            return f"available, priority {one.priority}", ""
        if state is not None:
            return state.reason, state.remedy
        elsewhere = availability(one, self.devices)
        if not elsewhere.available:
            return elsewhere.reason, ""
        return f"{self.device} was asked for" if self.asked.device else f"{self.device} ranks higher", ""


def select(
    taken: Candidate, model_type: str, spec: DeviceSpec, device_reason: str, trace: tuple[Consideration, ...]
) -> Selection:
    """A candidate made into a selection, for the reasons given."""
    return Selection(
        model_type=model_type,
        backend=taken.backend,
        device=taken.device,
        device_spec=spec,
        device_reason=device_reason,
        distribution=taken.distribution,
        version=taken.version,
        plugin=taken.plugin,
        manifest=taken.manifest,
        summary=taken.summary,
        priority=taken.priority,
        engine=taken.engine,
        config=taken.config,
        capabilities=taken.capabilities,
        needs=taken.needs,
        env=taken.env,
        process=taken.process,
        prepare=taken.prepare,
        before=taken.before,
        trace=trace,
    )
