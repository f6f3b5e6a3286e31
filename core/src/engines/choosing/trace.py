"""Every candidate of a choice, and why it is taken or left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.availability import availability
from engines.choosing.asked import Asked, Field
from engines.discovery import Broken
from engines.errors import EngineNotFound
from engines.selection import Availability, Candidate, Consideration


class Trace:
    """Filled as the choice goes on; its lines can be read at any time."""

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

    def take(self, candidate: Candidate, rivals: int) -> None:
        """Note the one that is taken, and among how many that were available."""
        self.taken = candidate
        self.rivals = rivals

    def lines(self) -> tuple[Consideration, ...]:
        """Every consideration, in the order in which it was made."""
        order = sorted(self.named, key=lambda one: (one is not self.taken, one.backend, one.device, -one.priority))
        return tuple([self._line(one) for one in order] + [_broken_line(one) for one in self.broken])

    def error(self, said: str, remedy: str | None = None) -> EngineNotFound:
        """The lookup error that holds all of them."""
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
        """Reason and remedy."""
        if one is self.taken:
            among = f", the highest of {self.rivals} available" if self.rivals > 1 else ""
            return f"priority {one.priority}{among}", ""
        unfit = self._unfit(one)
        if unfit is not None:
            return unfit, ""
        state = self.states.get(one)
        if state is None:
            return self._elsewhere(one), ""
        return (f"available, priority {one.priority}", "") if state.available else (state.reason, state.remedy)

    def _unfit(self, one: Candidate) -> str | None:
        if one.plugin in self.denied:
            return "denied"
        if self.asked.model_type not in one.model_types:
            return f"makes {', '.join(one.model_types)}"
        return None if self.asked.owns(one) else f"{self.asked.owner} was asked for"

    def _elsewhere(self, one: Candidate) -> str:
        """Why a candidate on another device than the chosen one is left."""
        state = availability(one, self.devices)
        if not state.available:
            return state.reason
        return f"{self.device} was asked for" if self.asked.device else f"{self.device} ranks higher"


def _broken_line(one: Broken) -> Consideration:
    reason = f"broken, {one.cause}"
    return Consideration(one.entry_point, "", one.distribution, one.version, None, False, reason, one.remedy)
