"""The engine that users hold, how it is made, and how an author's class is bound behind it."""

from engines.engine.creating import create
from engines.engine.facade import Engine, InferResult

__all__ = ["Engine", "InferResult", "create"]
