"""`engines doctor --load` holds the class that it loads to the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.fake_plugins import manifest, plugin

MISSPELT = """
from engines.testing.reference.config import ReferenceConfig as Config
from engines.testing.reference.engine import ReferenceEngine


class Engine(ReferenceEngine):
    def extra_sate(self):
        return {}
"""


@pytest.mark.more
def test_a_misspelt_hook(tmp_path: Path) -> None:
    declared = manifest("fake_misspelt", "misspelt", capabilities='["export"]')
    zipfile.ZipFile(plugin("misspelt", declared, code=MISSPELT).build(tmp_path)).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "engines", "doctor", "--load"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "ENGINES_DENY": "fsdp,megatron,mindspeed"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "extra_sate" in done.stdout and "extra_state" in done.stdout
