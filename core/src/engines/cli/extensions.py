"""Extensions of torch, each imported in a process of its own: what breaks `import torch` is found without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from engines.errors import BrokenPlugin
from engines.torch_extensions import GROUP, VARIABLE, TorchExtension, torch_extensions

TIMEOUT_S = 300.0

# As torch does it, but with torch imported before.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
from importlib.metadata import entry_points
for point in entry_points(group=sys.argv[2], name=sys.argv[3]):
    point.load()()
"""


@dataclass(frozen=True)
class ExtensionState:
    """An extension, and what importing it raises; None if nothing."""

    extension: TorchExtension
    error: str | None

    def broken(self) -> BrokenPlugin | None:
        """What its state breaks in other processes; None where nothing imports it, or it works."""
        one = self.extension
        if self.error is None or not one.importers:
            return None
        return BrokenPlugin(one.distribution, one.name, one.file, one.fault(self.error), one.remedy)


def examine_extensions() -> list[ExtensionState]:
    """Import each extension that is installed, and see what happens."""
    return [ExtensionState(one, _import_error(one)) for one in torch_extensions()]


def _import_error(extension: TorchExtension) -> str | None:
    command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), GROUP, extension.name]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, VARIABLE: "0"},
        )
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:.0f} s"
    if ended.returncode == 0:
        return None
    last = ended.stderr.strip().splitlines()[-1:] or [f"the process ended with code {ended.returncode}"]
    return last[0].strip()
