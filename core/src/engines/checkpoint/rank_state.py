"""One rank's own state (random generators, ...): tensors and JSON in one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.checkpoint_folder import strict_json
from engines.durable import Written
from engines.errors import CheckpointError
from engines.weights.safetensors_file import SafetensorsFile, write_safetensors

TENSOR = "$tensor"
TREE = "tree"


def write_rank_state(path: Path, state: dict[str, Any]) -> Written:
    """Write nested dicts and lists of JSON values and tensors. Raises TypeError for anything else."""
    tensors: dict[str, Tensor] = {}
    tree = strict_json.encode(_take_tensors(state, tensors), what="rank_state")
    return write_safetensors(path, tensors, {TREE: tree.decode()})


def read_rank_state(path: Path) -> dict[str, Any]:
    """What `write_rank_state` was given, its tensors on the CPU. Raises `CheckpointError` naming a bad file."""
    file = SafetensorsFile(path, error=CheckpointError)
    try:
        tree = json.loads(file.metadata()[TREE])
    except (KeyError, ValueError) as cause:
        raise CheckpointError(f"{path} is damaged: it holds no state of a rank") from cause
    state: dict[str, Any] = _put_tensors(tree, file)
    file.close()
    return state


def _take_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, dict):
        assert TENSOR not in value, f"{TENSOR} stands for a tensor"
        return {key: _take_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_take_tensors(item, tensors) for item in value]
    return value


def _put_tensors(tree: Any, file: SafetensorsFile) -> Any:
    if isinstance(tree, dict):
        if TENSOR in tree:
            return file.read(tree[TENSOR])
        return {key: _put_tensors(item, file) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_put_tensors(item, file) for item in tree]
    return tree
