"""MindSpeed's patches, put into this process before Megatron-Core is imported; core runs `install` as `prepare`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from engines.devices import NPU
from engines.discovery import find_module
from engines.discovery.metadata import installed
from engines.errors import LaunchError
from engines.process import imported_too_early
from engines_megatron.runtime import kinds
from engines_mindspeed.foreign import FRESH, call
from engines_mindspeed.patches import unpatched
from engines_mindspeed.versions import PAIRS, Pair, pair

ADAPTOR = "mindspeed.megatron_adaptor"
MEGATRON = "megatron.core"
GUIDE = (
    f"Follow MindSpeed's own installation guide for its branch {PAIRS[-1].branch}; "
    "the package index holds only a placeholder."
)


def install() -> None:
    """Patch Megatron-Core, and make sure that it is patched.

    Raises `LaunchError`: Megatron-Core is imported already, something is missing or doesn't fit, or the patches
    didn't take effect. What can be known beforehand is said before anything is patched.
    """
    _check_order()
    versions = _check_versions()
    _import_torch_npu()
    kinds.claim("npu")
    call(f"importing {ADAPTOR}", lambda: import_module(ADAPTOR))
    _check_effect(versions)


def _check_order() -> None:
    early = imported_too_early((MEGATRON,), None)
    if early is not None:
        raise LaunchError(
            f"megatron on npu must be loaded first, but {early}: MindSpeed would patch only half of it.",
            "Load the engine before anything that imports Megatron-Core, in a fresh process.",
        )


def _check_versions() -> Pair:
    megatron_core = _megatron_core_version()
    if find_module("mindspeed") is None:
        raise LaunchError("megatron on npu needs MindSpeed, which is not installed.", GUIDE)
    found = installed("mindspeed")
    if not found:
        raise LaunchError(
            "MindSpeed can be imported, but no metadata says which version it is.",
            "Install it as its guide says, with pip, rather than by a path to its sources.",
        )
    row = pair(found[0].version, megatron_core)
    if row is None:
        raise LaunchError(
            f"MindSpeed {found[0].version} and megatron-core {megatron_core} are no pair that this engine knows: "
            "MindSpeed patches one release of Megatron-Core.",
            f"Install {' or '.join(map(str, PAIRS))}.",
        )
    return row


def _megatron_core_version() -> str:
    """Of the package that an import would find, which metadata of another copy may not describe."""
    spec = find_module(MEGATRON)
    if spec is None or spec.origin is None:
        raise LaunchError(
            "megatron on npu needs megatron-core, which is not installed.",
            f'pip install "megatron-core{PAIRS[-1].megatron_core}"',
        )
    about = Path(spec.origin).with_name("package_info.py")
    text = about.read_text() if about.is_file() else ""
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        raise LaunchError(
            f"{spec.origin} is a Megatron-Core whose version cannot be read: {about.name} beside it does not say.",
            f'pip install "megatron-core{PAIRS[-1].megatron_core}"',
        )
    return ".".join(number[1] for number in numbers if number)


def _import_torch_npu() -> None:
    try:
        import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            raise LaunchError(
                "megatron on npu needs torch_npu, which is not installed.",
                NPU.install,
            ) from error
        raise LaunchError(
            f"torch_npu needs {error.name}, which cannot be found.", f"Install {error.name}."
        ) from error
    except (Exception, SystemExit) as error:  # an import runs anybody's code
        raise LaunchError(
            f"torch_npu is installed, but what it is built on cannot be loaded: {type(error).__name__}: {error}",
            NPU.toolkit,
        ) from error


def _check_effect(versions: Pair) -> None:
    faults = unpatched()
    if faults:
        raise LaunchError(
            f"MindSpeed was imported, but Megatron-Core is not patched as it should be: {'; '.join(faults)}. "
            f"{versions} is what MindSpeed states for torch {versions.torch}.",
            FRESH,
        )
