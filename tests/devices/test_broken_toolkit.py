"""An installed torch_npu without its toolkit, with which `import torch` fails: commands say what is the matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder
from support.commands import recipe, write_jsonl

CAUSE = "libhccl.so: cannot open shared object file: No such file or directory"
ANOTHERS_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
METADATA = "Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n"

Engines = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """`engines(*words, **variables)`: a command where torch_npu is installed, and CANN isn't."""
    info = tmp_path / "site/torch_npu-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "site/torch_npu.py").write_text(f"raise ImportError({CAUSE!r})\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ENGINES_")}

    def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "engines", *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**inherited, "PYTHONPATH": str(tmp_path / "site"), **variables},
        )

    return run


@pytest.mark.more
def test_torch_is_broken_there(engines: Engines, tmp_path: Path) -> None:
    """Else the other tests show nothing."""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in done.stderr


@pytest.mark.parametrize(
    ("words", "autoload", "importers"),
    [
        ("doctor", "1", "torch and transformers"),
        pytest.param("doctor --load", "0", "transformers", marks=pytest.mark.more),
    ],
)
def test_doctor_says_which_why_and_what_to_do(engines: Engines, words: str, autoload: str, importers: str) -> None:
    done = engines(*words.split(), TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("broken")]
    assert 'torch-npu: entry point "torch_npu"' in line
    assert f"{importers} import torch_npu by themselves, which fails: ImportError: {CAUSE}" in line
    assert "Install CANN" in line
    assert ("No engine was loaded" in done.stderr) == ("--load" in words)


@pytest.mark.more
def test_doctor_on_an_extension_that_works(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "site/torch_npu.py").write_text("def _autoload():\n    pass\n")
    report = json.loads(engines("doctor", "--json").stdout)
    assert report["torch_extensions"] == [{"name": "torch_npu", "distribution": "torch-npu", "error": None}]
    assert report["broken"] == []


@pytest.mark.parametrize("words", ["list", "why language_model", "show fsdp2", "schema engine:fsdp2"])
def test_other_commands_go_on(engines: Engines, words: str) -> None:
    done = engines(*words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.fixture
def work(tmp_path: Path) -> Path:
    tiny_folder(tmp_path, "llama").rename(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": list(range(2, length))} for length in (5, 9, 30, 7)])
    return tmp_path


@pytest.mark.parametrize(
    ("device", "variables", "importers"),
    [
        ("npu", {}, "torch and transformers"),
        pytest.param("cpu", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "transformers", marks=pytest.mark.more),
        pytest.param("npu", ANOTHERS_RANK, "torch and transformers", marks=pytest.mark.more),
    ],
    ids=["two ranks", "cpu, without autoload", "another's rank"],
)
def test_training_is_refused(
    engines: Engines, work: Path, device: str, variables: dict[str, str], importers: str
) -> None:
    asked = recipe(work, engine={"device": device}, launch={"nproc": 2})
    done = engines("train", asked, ENGINES_DEVICE="npu", **variables)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(CAUSE) == 1
    assert "Traceback" not in done.stderr
    assert f"{importers} import torch_npu by themselves, which fails: ImportError: {CAUSE}" in done.stderr
    assert "Install CANN" in done.stderr
    assert "uninstall torch-npu" in done.stderr


@pytest.mark.more
def test_a_module_that_brings_no_device(engines: Engines, work: Path) -> None:
    (work / "site/torch_npu.py").write_text("def _autoload():\n    pass\n")
    done = engines("train", recipe(work, engine={"device": "npu"}), ENGINES_DEVICE="npu")
    assert done.returncode == 2, done.stderr
    assert "local rank 0 needs a npu device of its own, and torch sees 0" in done.stderr
    assert "Install CANN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("import sys; sys.exit(3)", "SystemExit: 3", marks=pytest.mark.more),
        ("raise AttributeError('no such symbol')", "AttributeError: no such symbol"),
    ],
)
def test_however_it_fails(engines: Engines, work: Path, code: str, said: str) -> None:
    (work / "site/torch_npu.py").write_text(code + "\n")
    asked = recipe(work, engine={"device": "npu"})
    done = engines("train", asked, ENGINES_DEVICE="npu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (work / "out").exists()
