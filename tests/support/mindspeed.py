"""Fresh processes with a stand-in for MindSpeed, and for what it comes with, on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

FAKE = Path(__file__).with_name("fake_mindspeed")
NUMBERS = "MAJOR = {}\nMINOR = {}\nPATCH = {}\n"


def make_site(
    folder: Path,
    *,
    mindspeed: str | None = "0.16.0",
    adaptor: str | None = None,
    torch_npu: str | None = "",
    megatron_core: str | None = None,
) -> Path:
    """A folder for the path of a process, which it overrules what is installed with.

    `mindspeed`: the version that its metadata states; "" for none, None for no MindSpeed. `adaptor`: code of
    `mindspeed.megatron_adaptor` instead of the stand-in. `torch_npu`: code of that module, None for none.
    `megatron_core`: the version of a Megatron-Core that holds next to nothing, None for the real one.
    """
    folder.mkdir(parents=True)
    if mindspeed is not None and adaptor is None:
        (folder / "mindspeed").symlink_to(FAKE / "mindspeed")
    elif adaptor is not None:
        _write(folder / "mindspeed/__init__.py", "")
        _write(folder / "mindspeed/megatron_adaptor.py", adaptor)
        _write(folder / "mindspeed/patch_utils.py", "class MindSpeedPatchesManager:\n    patches_info = {}\n")
    if mindspeed:
        text = f"Metadata-Version: 2.1\nName: mindspeed\nVersion: {mindspeed}\n"
        _write(folder / f"mindspeed-{mindspeed}.dist-info/METADATA", text)
    if torch_npu is not None:
        _write(folder / "torch_npu.py", torch_npu)
    if megatron_core is not None:
        core = folder / "megatron/core"
        for package in ("", "models", "models/gpt", "optimizer"):
            _write(core / package / "__init__.py", "class Adam:\n    pass\n" if package == "optimizer" else "")
        _write(core / "models/gpt/gpt_layer_specs.py", "HAVE_TE = False\n")
        _write(core / "package_info.py", NUMBERS.format(*megatron_core.split(".")))
    return folder


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


PRELUDE = """
import json, sys
from engines.errors import EnginesError
from engines.loading import load
from engines.registry import registry

def refusal(function, *arguments, **more):
    try:
        function(*arguments, **more)
    except EnginesError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")

def imported(*names):
    return sorted(name for name in sys.modules if name.partition(".")[0] in names)

def choose(device="npu", backend="megatron"):
    return registry.resolve("language_model", backend, device)

"""


def fresh(site: Path, code: str, *words: str, **env: str) -> Any:
    """What the code hands to `answer` in a fresh process with `site` on its path and `words` in its command line.

    Every device that it asks for by name is taken for present.
    """
    text = PRELUDE + "def answer(said):\n    print('\\n' + json.dumps(said))\n\n" + textwrap.dedent(code)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ENGINES_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**kept, "PYTHONPATH": str(site), "ENGINES_DEVICE": "npu", "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
