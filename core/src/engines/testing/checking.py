"""`python -m engines.testing.checking`: what an engine's config class and its `check` do to a fresh interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines.config import ModelConfig
from engines.configuring import validate
from engines.errors import EnginesError
from engines.loading import load_config_class
from engines.registry import registry
from engines.testing.world import set_up

HEAVY = ("torch", "transformers", "numpy")
"""Modules that take seconds to import: a command that only says that a setting is wrong must not."""


def look(engine: str, device: str, setup: str, folder: Path) -> dict[str, Any]:
    """Which heavy modules are imported when settings are validated and checked for the model in `folder`, what
    checking them changed, and what it said, twice.
    """
    if setup:
        set_up(setup)
    config_class = load_config_class(registry.resolve("language_model", engine, device))
    config = validate(config_class, {"strategy": engine, "device": device}, where="engine")
    model, before = ModelConfig(path=str(folder)), _surroundings(folder)
    said = []
    for _ in range(2):
        try:
            config.check(model, model_type="language_model", world_size=1)
            said.append("")
        except EnginesError as refusal:
            said.append(str(refusal))
    after = _surroundings(folder)
    return {
        "imported": [name for name in HEAVY if name in sys.modules],
        "changed": [what for what, value in before.items() if after[what] != value],
        "said": said,
    }


def _surroundings(folder: Path) -> dict[str, Any]:
    return {
        "environment variables": dict(os.environ),
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "the model's folder": {path.name: path.read_bytes() for path in folder.iterdir()},
    }


if __name__ == "__main__":
    engine, device, setup, folder = sys.argv[1:]
    print(json.dumps(look(engine, device, setup, Path(folder))))
