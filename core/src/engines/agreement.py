"""Ranks that do something together and must fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from engines.errors import EnginesError


@dataclass(frozen=True)
class Peers:
    """The ranks of a process group, this one among them; objects that they exchange must be small."""

    rank: int
    size: int
    group: ProcessGroup | None

    @classmethod
    def of(cls, group: ProcessGroup | None = None) -> Peers:
        """The ranks of `group`; None: of the default group, or this process where there is none."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that acts for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank, on the first rank; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, group=self.group, group_dst=0)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    @contextmanager
    def all_or_none(self, doing: str, *, error: type[EnginesError]) -> Iterator[None]:
        """Run the body on every rank; where it raises on one, every rank raises, that rank's cause first.

        The body must hold no collective in which others would wait for a rank that fails. What the user can mend
        (OSError, EnginesError) becomes `error`, with a message that starts with `doing`; a defect is raised as it
        is on the rank that has it, and as RuntimeError on the others.
        """
        cause: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 (raised below, once the others know)
            cause = raised
        failures = self.all_gather(_Failure.of(cause))
        first = next(((rank, failure) for rank, failure in enumerate(failures) if failure), None)
        if first is None:
            return
        rank, failure = first
        if cause is not None and not failures[self.rank].mendable:
            raise cause
        message = f"{doing}: {failure.text}" if self.size == 1 else f"{doing}: rank {rank}: {failure.text}"
        if failure.mendable:
            raise error(message, failure.remedy) from cause
        raise RuntimeError(message) from cause


@dataclass(frozen=True)
class _Failure:
    text: str
    mendable: bool
    remedy: str | None

    @classmethod
    def of(cls, error: Exception | None) -> _Failure | None:
        if error is None:
            return None
        if isinstance(error, EnginesError):
            return cls(error.message, True, error.remedy)
        if isinstance(error, OSError):
            return cls(str(error), True, None)
        return cls(f"{type(error).__name__}: {error}", False, None)
