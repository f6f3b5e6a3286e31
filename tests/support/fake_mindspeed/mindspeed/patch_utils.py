"""Patches by dotted name: put in wherever the object is held as a module's attribute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


class Patch:
    def __init__(self, name: str, make: Callable[[Any], Any]) -> None:
        self.name = name
        self.is_applied = False
        self._make = make

    def apply(self) -> None:
        holder, attribute = self._place()
        self._before = getattr(holder, attribute)
        self._after = self._make(self._before)
        _replace(holder, attribute, self._before, self._after)
        self.is_applied = True

    def remove(self) -> None:
        if self.is_applied:
            holder, attribute = self._place()
            _replace(holder, attribute, self._after, self._before)
            self.is_applied = False

    def _place(self) -> tuple[Any, str]:
        """`module.attribute` or `module.Class.attribute`."""
        path, _, attribute = self.name.rpartition(".")
        try:
            return import_module(path), attribute
        except ModuleNotFoundError:
            module, _, cls = path.rpartition(".")
            return getattr(import_module(module), cls), attribute


def _replace(holder: Any, attribute: str, before: Any, after: Any) -> None:
    setattr(holder, attribute, after)
    for name, module in list(sys.modules.items()):
        if not name.startswith("mindspeed") and vars(module).get(attribute) is before:
            setattr(module, attribute, after)


class MindSpeedPatchesManager:
    patches_info: dict[str, Patch] = {}  # noqa: RUF012  # where the real one has it

    @classmethod
    def register(cls, name: str, make: Callable[[Any], Any]) -> None:
        cls.patches_info[name] = Patch(name, make)

    @classmethod
    def apply(cls) -> None:
        for patch in cls.patches_info.values():
            patch.apply()

    @classmethod
    def remove(cls) -> None:
        for patch in reversed(cls.patches_info.values()):
            patch.remove()
        cls.patches_info.clear()
