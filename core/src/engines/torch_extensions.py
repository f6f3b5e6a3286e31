"""Extensions that torch imports by itself when it is imported, such as torch_npu: a broken one breaks `import torch`.

They are entry points of the group `torch.backends`, and found here as engines are: by metadata, without torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import importlib_metadata

from engines.devices import BUILT_IN
from engines.errors import LaunchError

VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch imports its extensions unless this is set to something other than 1."""
GROUP: Final = "torch.backends"
IMPORTED_BY_TRANSFORMERS: Final = ("torch_npu",)
"""Modules that transformers imports wherever they are installed, so that a broken one breaks every model."""


@dataclass(frozen=True)
class TorchExtension:
    """An entry point of `torch.backends`, and whose it is."""

    name: str
    module: str
    distribution: str
    file: str
    """The metadata that declares it."""

    @property
    def importers(self) -> list[str]:
        """Who imports it, whatever the device."""
        others = ["transformers"] if self.module in IMPORTED_BY_TRANSFORMERS else []
        return ["torch", *others] if os.environ.get(VARIABLE, "1") == "1" else others

    @property
    def remedy(self) -> str:
        """What brings what it is built on, and how to do without it."""
        toolkits = {spec.module: spec.toolkit for spec in BUILT_IN.values()}
        mend = toolkits.get(self.module) or f"Reinstall {self.distribution}, and install what it is built on."
        without = f"Or uninstall {self.distribution}; {VARIABLE}=0 keeps torch from importing it, and nobody else."
        return f"{mend} {without}"

    def fault(self, error: str) -> str:
        """What it means that importing it fails with `error`."""
        return f"{' and '.join(self.importers)} import {self.module} by themselves, which fails: {error}"


def torch_extensions() -> list[TorchExtension]:
    """Every extension that is installed, by name."""
    found: dict[str, TorchExtension] = {}
    for dist in importlib_metadata.Distribution.discover():
        text = dist.read_text("entry_points.txt") or ""
        for point in dist.entry_points.select(group=GROUP) if f"[{GROUP}]" in text else ():
            file = os.path.join(str(getattr(dist, "_path", "")), "entry_points.txt")
            found.setdefault(point.name, TorchExtension(point.name, point.module, dist.name, file))
    return [found[name] for name in sorted(found)]


def check_torch() -> None:
    """Import torch and the extensions that come with it or with transformers, if any is installed.

    Called before anything else imports torch. Raises `LaunchError` if an extension cannot be imported; the process
    then has half a torch, and is of no use any more.
    """
    if "torch" in sys.modules:
        return
    extensions = [one for one in torch_extensions() if one.importers]
    for one in extensions:
        try:
            import_module("torch")
            import_module(one.module)
        except (Exception, SystemExit) as error:  # an import runs anybody's code
            cause = error.__cause__ or error  # torch says only which extension failed
            blamed = next((each for each in extensions if f"extension: {each.name}." in str(error)), one)
            raise LaunchError(blamed.fault(f"{type(cause).__name__}: {cause}"), blamed.remedy) from error
