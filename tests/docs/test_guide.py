"""What the author's guide shows beyond the reference engine passes the conformance kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documenting import ROOT

GUIDE = (ROOT / "docs/writing-an-engine.md").read_text()
REGISTER = """

def register():
    from engines.registry import registry
    from engines.testing.reference import REFERENCE

    capabilities = (*REFERENCE["capabilities"], "data_parallel")
    mine = {"backend": "guided", "engine": "guided:DataParallelEngine", "capabilities": capabilities}
    if not any(one.backend == "guided" for one in registry.candidates()):
        registry.register(**{**REFERENCE, **mine})
"""
KIT = 'from engines.testing import conformance\n\ntests = conformance("guided", setup="guided:register")\n'


@pytest.mark.more
def test_the_data_parallel_engine_passes_the_kit(tmp_path: Path) -> None:
    code = re.search(r'title="the reference, data-parallel"\n(.*?)```', GUIDE, re.DOTALL)
    assert code
    (tmp_path / "guided.py").write_text(code[1] + REGISTER)
    (tmp_path / "test_kit.py").write_text(KIT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "dp2 and (training or checkpoint or edges)", "test_kit.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^data_parallel +proven by", done.stdout, re.MULTILINE)
