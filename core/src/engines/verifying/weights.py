"""Weights as an engine sends them and as it exports them, held against those of another run; one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

ROUNDING = 2.0**-23
"""The distance of float32's numbers from each other, relative to them."""
FEW = 3
"""Names in a message."""


class Folder:
    """The tensors of a folder's safetensors files, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        files: list[Any] = [safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))]
        self._homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no mapping)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._homes)

    def read(self, name: str) -> Tensor:
        """One of them."""
        tensor: Tensor = self._homes[name].get_tensor(name)
        return tensor


def compare_weights(
    stream: Iterable[tuple[str, Tensor]], exported: Path, expected: Path
) -> tuple[float, float, list[str]]:
    """The largest relative difference between `expected`'s weights and the stream's, and the export's; and faults.

    Relative to the largest value of each tensor. Faults are names, shapes and dtypes that aren't as expected, and an
    export that doesn't hold the bits of the stream.
    """
    written, reference = Folder(exported), Folder(expected)
    sent: set[str] = set()
    worst_sent = worst_written = 0.0
    other_form, other_bits = [], []
    for name, tensor in stream:
        sent.add(name)
        weight = tensor.detach().cpu()
        if name in written.names and not torch.equal(written.read(name), weight):
            other_bits.append(name)
        if name not in reference.names:
            continue
        wanted = reference.read(name)
        if (weight.shape, weight.dtype) != (wanted.shape, wanted.dtype):
            other_form.append(f"{name} {_form(weight)} instead of {_form(wanted)}")
        worst_sent = max(worst_sent, difference(weight, wanted))
        if name in written.names:
            worst_written = max(worst_written, difference(written.read(name), wanted))
    faults = [
        *_other_names("get_per_tensor_param() sends", sent, reference.names),
        *_other_names("the export holds", written.names, reference.names),
        *_list("get_per_tensor_param() sends", other_form),
        *_list("the export doesn't hold the bits that get_per_tensor_param() sends of", other_bits),
    ]
    return worst_sent, worst_written, faults


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value of `expected`; inf where it is no number."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    if not found.is_floating_point():
        return math.inf
    off, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    return off / largest if math.isfinite(off) and largest else math.inf


def round_otherwise(folder: Path, seed: int) -> None:
    """Move each float32 number of a model folder by at most what rounding could have moved it."""
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.mul_(1 + ROUNDING * (2 * torch.rand(tensor.shape, generator=generator) - 1))
        save_file(tensors, file, {"format": "pt"})


def _other_names(who: str, found: Iterable[str], expected: Iterable[str]) -> Iterator[str]:
    yield from _list(f"{who} no", sorted({*expected} - {*found}))
    yield from _list(f"{who} also", sorted({*found} - {*expected}))


def _list(said: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        yield f"{said} {', '.join(names[:FEW])}{more}"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
