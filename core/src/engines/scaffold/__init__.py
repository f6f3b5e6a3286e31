"""`engines new`: a distribution whose engine is listed and passes the conformance kit before its author has begun."""

from __future__ import annotations

from engines.scaffold.naming import Names
from engines.scaffold.rendering import render
from engines.scaffold.writing import new_plugin

__all__ = ["Names", "new_plugin", "render"]
