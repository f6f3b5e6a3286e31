"""Engines that are wrong in one way each, installed where a process of its own finds them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from support.fake_plugins import manifest, plugin

CAPABILITIES = {"capabilities": '["export"]'}

CODE = """
from engines.errors import ConfigError
from engines.testing.reference.config import ReferenceConfig
from engines.testing.reference.engine import ReferenceEngine


class Config(ReferenceConfig):
    {check}


class Engine(ReferenceEngine):
    {override}
"""

OVERRIDES = {
    "heavy": """
    def step(self):
        for weight in self._model.parameters():
            weight.grad.mul_(1.01)
        return super().step()
""",
    "dies": """
    def step(self):
        import os

        print("out of memory on tile 7", flush=True)
        os._exit(9)
""",
    "trips": """
    def step(self):
        raise KeyError("lr_scale")
""",
}
"""What is wrong with each, by its backend."""

REFUSES = """
    def check(self, model, *, model_type, world_size):
        raise ConfigError("this engine trains nothing below 7B", "Take a larger model.")
"""


def install_faulty_engines(site: Path) -> Path:
    """Put all of them, and `refuses`, whose config takes no model, into a folder for PYTHONPATH."""
    code = {name: CODE.format(check="pass", override=override) for name, override in OVERRIDES.items()}
    code["refuses"] = CODE.format(check=REFUSES, override="pass")
    site.mkdir()
    for name, text in code.items():
        declared = manifest(f"fake_{name}", name, **CAPABILITIES)
        zipfile.ZipFile(plugin(name, declared, code=text).build(site)).extractall(site)
    return site
