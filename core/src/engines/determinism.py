"""Random generators: seeding, saving, restoring; and kernels that repeat to the bit."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch

from engines.device_services import DeviceServices
from engines.errors import LaunchError

DETERMINISTIC_ENV = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "HCCL_DETERMINISTIC": "true",
}
"""Read by cuBLAS, transformers' flash attention and Ascend's collectives when they start."""


def seed_everything(seed: int, *parts: int | str) -> int:
    """Seed Python's, NumPy's and torch's generators, on every device of this process; returns the seed used.

    Called on every rank, before the model is built. `parts` tell streams of one seed apart ("dropout", dp_rank);
    without any, every rank gets the same numbers.
    """
    mixed = derive_seed(seed, *parts)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
    return mixed


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed for the stream that `parts` name, the same in every process; `seed` itself without parts."""
    if not parts:
        return seed
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def full_determinism(device: torch.device) -> None:
    """Use only kernels that give the same bits each time; one without such a kernel raises when it is called.

    Called on every rank, before the first use of `device`. Raises `LaunchError` if it was used already and its
    libraries have read other settings by then.
    """
    late = [name for name, value in DETERMINISTIC_ENV.items() if os.environ.get(name) != value]
    if late and DeviceServices(device).is_in_use():
        raise LaunchError(
            f"full determinism needs {', '.join(late)} set before the {device.type} is used, and it has been used",
            f"start with {' '.join(f'{name}={DETERMINISTIC_ENV[name]}' for name in late)}",
        )
    os.environ |= DETERMINISTIC_ENV
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators, that of `device` included: JSON values and tensors."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {
            "name": legacy["bit_generator"],
            "key": legacy["state"]["key"].tolist(),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = DeviceServices(device).rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> bool:
    """Restore what `rng_state` returned.

    Returns False if that was on another kind of device than `device`, whose own generator then stays as it is.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = state["numpy"]
    np.random.set_state(
        (numpy["name"], np.array(numpy["key"], np.uint32), numpy["pos"], numpy["has_gauss"], numpy["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        DeviceServices(device).set_rng_state(state[device.type])
    return state.keys() - {"python", "numpy", "torch"} == {device.type} - {"cpu"}
