"""Which engine is held to the contract; what a test file says, and pytest collects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conformance:
    """The kit for one engine on one device; pytest collects it where a test module holds it."""

    engine: str
    """Its backend, as `engines list` shows it."""
    device: str | None = None
    """None: cpu if the engine runs there, else the one that the registry chooses."""
    setup: str | None = None
    """package.module:function, called in every process before the engine is looked up; registers one that isn't
    installed."""


def conformance(engine: str, device: str | None = None, *, setup: str | None = None) -> Conformance:
    """The kit for `engine`, to be assigned to a name of a test module.

        tests = conformance("mine", device="mychip")

    Every clause of the contract becomes a test below that name.
    """
    return Conformance(engine, device, setup)
