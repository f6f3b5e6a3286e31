"""Builds the C++ extension, once for each torch and state of the sources, below .cache/simulated_npu.

    python tests/simulated_npu/build.py            build it unless it is there
    python tests/simulated_npu/build.py --check    only say what is missing for that, if anything

Imports no torch: the build runs in a process of its own, so that nobody gets a device by asking for the file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

NAME = "simulated_npu_extension"
SOURCES = Path(__file__).with_name("csrc")
CACHE = Path(__file__).parents[2] / ".cache/simulated_npu"
OPTIMIZATION = "-O1"
"""Compiles in half the time of -O2, and the kernels are torch's own anyway."""
COLLECTIVES = ("hccl.cpp", "module.cpp")
"""Compiled together, and all other files together: what takes time is reading torch's headers."""


class ToolMissing(RuntimeError):
    """The compiler or ninja isn't there."""


def library() -> Path:
    """The built extension; the first who asks builds it, others wait.

    Raises `ToolMissing`, or `RuntimeError` with the compiler's words.
    """
    folder = CACHE / _key()
    built = folder / f"{NAME}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not built.exists():
            if missing := missing_tools():
                raise ToolMissing(missing)
            _build(folder / "objects", built)
    return built


def missing_tools() -> str | None:
    """What to install before the extension can be built, in words; None if nothing."""
    path = _search_path()
    compiler = os.environ.get("CXX", "c++")
    lacks = []
    if shutil.which(compiler, path=path) is None:
        lacks.append(f"a C++ compiler ({compiler}; install g++, or name one in CXX)")
    if shutil.which("ninja", path=path) is None:
        lacks.append("ninja (pip install ninja)")
    if not lacks:
        return None
    return f"the simulated NPU, on which tests of device npu run, can't be built without {' and '.join(lacks)}"


def _key() -> str:
    """Names all that decides what is built."""
    digest = hashlib.sha256(OPTIMIZATION.encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"torch-{version('torch')}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def _build(work: Path, built: Path) -> None:
    print("Building the simulated NPU (once for each torch; half a minute on an idle machine) ...", flush=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    files = sorted(SOURCES.glob("*.cpp"))
    for unit, members in {
        "collectives": [file for file in files if file.name in COLLECTIVES],
        "device": [file for file in files if file.name not in COLLECTIVES],
    }.items():
        (work / f"{unit}.cpp").write_text("".join(f'#include "{file}"\n' for file in members))
    environment = {**os.environ, "PATH": _search_path()}
    environment.setdefault("MAX_JOBS", str(os.cpu_count()))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _COMPILE, NAME, str(work), OPTIMIZATION],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the simulated NPU could not be built:\n{done.stdout[-8000:]}")
    os.replace(work / f"{NAME}.so", built)
    shutil.rmtree(work)


def _search_path() -> str:
    """PATH, with the folder of this Python first: there lies the ninja that `make setup` installs."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


_COMPILE = """
import sys
from pathlib import Path
from torch.utils.cpp_extension import load

name, work, optimization = sys.argv[1:]
load(name, sorted(map(str, Path(work).glob("*.cpp"))), extra_cflags=[optimization], build_directory=work)
"""


def main() -> int:
    """Missing tools are an error in CI alone; elsewhere tests that need them are skipped."""
    missing = missing_tools()
    if missing:
        print(f"Note: {missing}.")
        return 1 if os.environ.get("CI") else 0
    if "--check" not in sys.argv:
        library()
    return 0


if __name__ == "__main__":
    sys.exit(main())
