"""Devices: what each is called by whom, and which are present here. Found without importing torch.

`cpu` is always present. Another device is present if (first answer wins)

1. torch, when something has already imported it and it knows the device (by another name than `cpu`), says so or not;
2. the variable that hides devices (`CUDA_VISIBLE_DEVICES`, ...) is empty or -1: it is not;
3. `ENGINES_DEVICE` names it;
4. one of its device nodes exists.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from engines.errors import LaunchError, did_you_mean

DEVICE_VARIABLE: Final = "ENGINES_DEVICE"


@dataclass(frozen=True)
class DeviceSpec:
    """A device and the names under which others know it."""

    name: str
    """The word in recipes, manifests and `ENGINES_DEVICE`."""
    rank: int
    """The highest-ranked device that is present is chosen when nobody names one."""
    nodes: tuple[str, ...]
    """File patterns of which at least one exists where the device and its driver are present."""
    module: str
    """The module whose import makes torch know the device."""
    dist_backend: str
    """Its backend of torch.distributed."""
    visible_devices_env: str | None
    """The environment variable that hides devices from a process."""
    torch_device: str
    """Its type in `torch.device`."""
    install: str | None = None
    """How to get the module, where no package index brings all that it takes."""
    toolkit: str | None = None
    """What to do where the module is installed, but not what the vendor's libraries in it are built on."""


CPU = DeviceSpec("cpu", 0, (), "torch", "gloo", None, "cpu")
CUDA = DeviceSpec(
    name="cuda",
    rank=100,
    # NVIDIA's driver, the same under WSL, and AMD's, whose torch calls its devices cuda as well
    nodes=("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so.1", "/dev/kfd"),
    module="torch",
    dist_backend="nccl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    torch_device="cuda",
)
NPU = DeviceSpec(
    name="npu",
    rank=90,
    nodes=("/dev/davinci[0-9]*",),
    module="torch_npu",
    dist_backend="hccl",
    visible_devices_env="ASCEND_RT_VISIBLE_DEVICES",
    torch_device="npu",
    install="install CANN and the torch_npu that fits torch, as Ascend's installation guide says",
    toolkit="Install CANN, Ascend's toolkit, and source its set_env.sh in the shell that starts this.",
)

BUILT_IN: Final[Mapping[str, DeviceSpec]] = {spec.name: spec for spec in (CUDA, NPU, CPU)}


@dataclass(frozen=True)
class Presence:
    """Whether a device is here, and how that was found."""

    present: bool
    how: str
    looked_for: tuple[str, ...] = ()
    """The file patterns of which none exists."""


def presence(spec: DeviceSpec) -> Presence:
    """Whether a device is present in this process, by the rules in this module's docstring."""
    if spec.name == CPU.name:
        return Presence(True, "always there")
    imported = _ask_imported_torch(spec)
    if imported is not None:
        return imported
    variable = spec.visible_devices_env
    if variable is not None and os.environ.get(variable, "unset").strip() in ("", "-1"):
        return Presence(False, f"{variable}={os.environ[variable]!r} hides it")
    if named_device() == spec.name:
        return Presence(True, f"{DEVICE_VARIABLE} names it")
    for pattern in spec.nodes:
        if found := sorted(glob.glob(pattern)):
            return Presence(True, f"{found[0]} exists")
    return Presence(False, "no such device here", spec.nodes)


def named_device() -> str | None:
    """What `ENGINES_DEVICE` names, if it is set and not empty."""
    return os.environ.get(DEVICE_VARIABLE, "").strip() or None


_ALSO_CALLED: Final = {"gpu": "cuda", "ascend": "npu"}
"""What users say, where the word alone would suggest another device."""


def check_known(name: str, known: Iterable[str], asked_by: str) -> None:
    """Raise LaunchError if no installed distribution describes the device `name`."""
    names = sorted(known)
    if name not in names:
        hint = did_you_mean(_ALSO_CALLED.get(name, name), names)
        raise LaunchError(
            f'{asked_by} asks for device "{name}", which nobody describes.{hint}',
            f"Known devices: {', '.join(names)}; a plugin adds one with [[device]] in its engine.toml"
            " (`engines doctor` says whether one is refused).",
        )


def _ask_imported_torch(spec: DeviceSpec) -> Presence | None:
    """What an already imported torch says; None if it is not imported or does not know the device."""
    if spec.torch_device == CPU.name:  # which torch always knows: that says nothing of what stands behind it
        return None
    torch = sys.modules.get("torch")
    services = getattr(torch, spec.torch_device, None)
    is_available = getattr(services, "is_available", None)
    if is_available is None:
        return None
    if spec == CUDA and not str(getattr(is_available, "__module__", "")).startswith("torch.cuda"):
        return Presence(False, f"{is_available.__module__} answers in the place of torch.cuda")
    if is_available():
        return Presence(True, f"torch.{spec.torch_device}.is_available()")
    return Presence(False, f"torch.{spec.torch_device}.is_available() is False")
