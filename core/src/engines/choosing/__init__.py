"""The choice of one engine: the device first, then the owner on that device.

**Device**: the one that was named (as an argument, by `ENGINES_DEVICE`, or in the configuration, in this order),
else the highest-ranked one that is present and that any candidate supports. **Owner**: `backend@distribution` if
written so, else the highest priority among those available on that device, else an error that names both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.availability import availability
from engines.choosing.asked import Asked, Field, ask
from engines.choosing.trace import Trace
from engines.devices import DeviceSpec, check_known, presence
from engines.errors import did_you_mean
from engines.selection import Candidate, Consideration, Selection

__all__ = ["Asked", "Field", "ask", "best_device", "choose", "select"]

PUBLISHED: Mapping[tuple[str | None, str | None], str] = {
    ("fsdp2", None): "engines-fsdp",
    ("megatron", None): "engines-megatron",
    ("megatron", "npu"): "engines-mindspeed",
}
"""What to install for a backend of this project, on one device or on all others."""


def choose(asked: Asked, field: Field) -> Selection:
    """The one engine that is meant. Raises EngineNotFound with every candidate and why it was left."""
    if asked.device is not None:
        check_known(asked.device, field.devices, asked.device_by)
    named = [one for one in field.candidates if asked.backend in (None, one.backend)]
    fitting = [one for one in named if asked.model_type in one.model_types and asked.owns(one)]
    fitting = [one for one in fitting if one.plugin not in field.denied]
    trace = Trace(asked, field, named)
    if not fitting:
        raise trace.error(_nothing_fits(asked, field, named))
    device, device_reason = best_device(asked, fitting, field.devices)
    trace.device = device
    here = [one for one in fitting if one.device == device]
    if not here:
        supported = ", ".join(sorted({one.device for one in fitting}))
        said = f"No engine for {asked}: it runs on {supported}."
        raise trace.error(said, _for_device(asked, device, named, field.denied))
    states = {one: availability(one, field.devices) for one in here}
    trace.states = states
    available = [one for one in here if states[one].available]
    if not available:
        remedy = next((state.remedy for state in states.values() if state.remedy), None)
        raise trace.error(f"No engine for {asked} can run here.", remedy)
    highest = max(one.priority for one in available)
    best = [one for one in available if one.priority == highest]
    if len(best) > 1:
        said = f"{asked.model_type} on {device} has several owners of equal priority {highest}."
        raise trace.error(said, _settle(best))
    trace.take(best[0], len(available))
    return select(best[0], asked.model_type, field.devices[device], device_reason, trace.lines())


def best_device(asked: Asked, fitting: Sequence[Candidate], devices: Mapping[str, DeviceSpec]) -> tuple[str, str]:
    """The device that is asked for, or else the best one that is present and supported by a candidate; and why."""
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
        own = PUBLISHED.get((asked.backend, asked.device)) or PUBLISHED.get((asked.backend, None))
        if own is not None:
            said += f" It comes with: pip install {own}."
        return said
    allowed = [one for one in named if one.plugin not in field.denied]
    if not allowed:
        return f"No engine for {asked}: the deny list leaves none."
    if asked.owner is not None and not any(asked.owns(one) for one in allowed):
        owners = sorted({one.distribution for one in allowed})
        said = f'No engine for {asked}: "{asked.owner}" does not own it.{did_you_mean(asked.owner, owners)}'
        return f"{said} Owners: {', '.join(owners)}."
    known = sorted({model_type for one in allowed for model_type in one.model_types})
    said = f"No engine for {asked}: it makes {', '.join(known)}."
    able = sorted({one.backend for one in field.candidates if asked.model_type in one.model_types})
    return (
        f"{said} Engines that make {asked.model_type}: {', '.join(able)}."
        if able
        else said + did_you_mean(asked.model_type, known)
    )


def _for_device(asked: Asked, device: str, named: Sequence[Candidate], denied: frozenset[str]) -> str | None:
    """How to get that backend for the device: one is installed but was ruled out, or one is published."""
    for one in named:
        if one.device == device and asked.model_type in one.model_types:
            if one.plugin in denied:
                return f"{one.distribution} has it for {device}: take {one.plugin} out of the deny list."
            return f"{one.distribution} has it for {device}: write {one.backend}@{one.distribution}."
    own = PUBLISHED.get((asked.backend, device))
    return f"For {device} install its distribution: pip install {own}" if own else None


def _settle(best: Sequence[Candidate]) -> str:
    """What settles a tie."""
    spelt = sorted({f"{one.backend}@{one.distribution}" for one in best})
    if len(spelt) == 1:
        return "Give one of them a higher priority."
    ids = ", ".join(sorted({one.plugin for one in best}))
    return f"Write {' or '.join(spelt)}, or put one of {ids} in ENGINES_DENY."


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
