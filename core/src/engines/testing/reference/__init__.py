"""`ReferenceEngine`: the verified fake. Plain transformers in one process, on the CPU; it passes the kit.

It is what other engines are compared with, a double for tests of what stands above an engine, and the example of the
author's guide. It belongs to no distribution: a process that wants it registers it.

    from engines.testing.reference import reference_engine

    with reference_engine():
        engine = engines.create({"path": folder}, {"strategy": "reference"})
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from engines.registry import EngineFields, registry

__all__ = ["REFERENCE", "reference_engine", "register"]

REFERENCE: Final[EngineFields] = {
    "backend": "reference",
    "model_type": ("language_model", "value_model"),
    "device": "cpu",
    "priority": 0,  # never taken where nobody names it
    "engine": "engines.testing.reference.engine:ReferenceEngine",
    "config": "engines.testing.reference.config:ReferenceConfig",
    "capabilities": ("export", "entropy", "deterministic", "offload"),
    "needs": ("torch", "transformers"),
    "summary": "Plain transformers in one process: what other engines are compared with",
}
"""What `engine.toml` would say of it; a subclass is registered as `{**REFERENCE, "engine": Mine}`."""


def register() -> None:
    """Register it for the rest of this process; once, however often it is called."""
    if not _is_registered():
        registry.register(**REFERENCE)


@contextmanager
def reference_engine() -> Iterator[None]:
    """Register it for the length of a `with` block, unless it is registered already."""
    if _is_registered():
        yield
        return
    with registry.registered(**REFERENCE):
        yield


def _is_registered() -> bool:
    mine = REFERENCE["backend"], REFERENCE["engine"]
    return any((one.backend, one.engine) == mine for one in registry.candidates())
