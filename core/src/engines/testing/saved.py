"""What a checkpoint holds, whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engines import checkpoint


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Everything that it holds of model and optimizer, by key."""
    saved = checkpoint.open(path)
    reader = saved.reader(saved.manifest.contents)
    found = {key: reader.read(key, (0,) * len(reader.shape(key)), reader.shape(key)) for key in sorted(reader.keys())}
    reader.close()
    return found


def weights_in(path: Path) -> dict[str, Tensor]:
    """The weights alone, by name."""
    return {key.removeprefix("model."): value for key, value in tensors_in(path).items() if key.startswith("model.")}


def assert_equal_checkpoints(found: Path, expected: Path) -> None:
    """Two checkpoints hold the same weights and optimizer state, to the bit."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert ours.keys() == theirs.keys(), f"only one of them holds {sorted(ours.keys() ^ theirs.keys())}"
    off = sorted(key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor))
    assert not off, (
        f"the second run leaves other numbers in {len(off)} of {len(theirs)} tensors: {', '.join(off[:5])}"
    )
