"""Weights that a folder stores in another shape than the model holds them: experts one by one, fused in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engines.errors import ModelError

if TYPE_CHECKING:
    from engines.weights import WeightsReader

Read = Callable[[Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class WeightSource:
    """Where one weight of the model comes from."""

    shape: tuple[int, ...]
    read: Read
    """`read(offset, shape)`: that block on the CPU, in the dtype of the file; reads no more than it must."""


@dataclass
class Sources:
    """Keys of a folder that together make the weight `target`, by the pattern of `converter` that they match."""

    target: str
    converter: Any | None
    """transformers' `WeightConverter`; None: the one key is the weight, under this or another name."""
    by_pattern: dict[str, list[str]] = field(default_factory=dict)

    def add(self, pattern: str, key: str) -> None:
        self.by_pattern.setdefault(pattern, []).append(key)

    def all_keys(self) -> list[str]:
        return [key for keys in self.by_pattern.values() for key in keys]


def weight_sources(model: Any, folder: WeightsReader, sources: Sources) -> dict[str, WeightSource]:
    """The weights that `sources` makes, by name; one, save where a fused tensor of the folder is split."""
    if sources.converter is None:
        key = sources.all_keys()[0]
        return {sources.target: WeightSource(folder.shape(key), lambda *at: folder.read(key, block(*at)))}
    if _is_stack_of_experts(sources):
        return {sources.target: _experts(sources, folder)}
    empty = {
        key: torch.empty(folder.shape(key), dtype=folder.dtype(key), device="meta") for key in sources.all_keys()
    }
    made = _convert(model, sources, empty)
    return {
        name: WeightSource(tuple(value.shape), _whole(model, folder, sources, name)) for name, value in made.items()
    }


def block(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of the block at `offset` with `shape`."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _whole(model: Any, folder: WeightsReader, sources: Sources, name: str) -> Read:
    """Convert the full tensors, then cut: for conversions that have no cheaper way."""

    def read(offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        full = {key: folder.read(key) for key in sources.all_keys()}
        return _convert(model, sources, full)[name][block(offset, shape)]

    return read


def _convert(model: Any, sources: Sources, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run transformers' conversion, as `from_pretrained` does."""
    assert sources.converter is not None
    converter = deepcopy(sources.converter)
    for pattern, keys in sources.by_pattern.items():
        for key in keys:
            converter.add_tensor(sources.target, key, pattern, tensors[key])
    made = converter.convert(sources.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _is_stack_of_experts(sources: Sources) -> bool:
    """Whether the weight is experts stacked along dimension 0, each a concatenation along its own dimension 0."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    assert sources.converter is not None
    operations = [(type(op), op.dim) for op in sources.converter.operations]
    return operations in (
        [(MergeModulelist, 0)] if len(sources.by_pattern) == 1 else [],
        [(MergeModulelist, 0), (Concatenate, 1)],
    )


def _experts(sources: Sources, folder: WeightsReader) -> WeightSource:
    """`weight[e]` = the tensors of expert e, one per pattern, below each other; reads only the experts asked for."""
    assert sources.converter is not None
    patterns = [pattern for pattern in sources.converter.source_patterns if pattern in sources.by_pattern]
    parts = [sources.by_pattern[pattern] for pattern in patterns]
    shapes = [_common_shape(keys, folder) for keys in parts]
    if len({len(keys) for keys in parts}) > 1:
        counts = ", ".join(f"{len(keys)} like {pattern}" for pattern, keys in zip(patterns, parts, strict=True))
        raise ModelError(f"{folder.path}: not every expert of {sources.target} is whole: there are {counts}")
    dtype = folder.dtype(parts[0][0])
    shape = (len(parts[0]), sum(part[0] for part in shapes), *shapes[0][1:])

    def read(offset: Sequence[int], size: Sequence[int]) -> Tensor:
        out = torch.empty(tuple(size), dtype=dtype)
        begin, end = offset[1], offset[1] + size[1]
        first_row = 0
        for keys, part in zip(parts, shapes, strict=True):
            low, high = max(begin, first_row), min(end, first_row + part[0])
            if low < high:
                rows = slice(low - first_row, high - first_row)
                for i in range(size[0]):
                    source = folder.read(keys[offset[0] + i], (rows, *block(offset[2:], size[2:])))
                    out[i, low - begin : high - begin] = source
            first_row += part[0]
        return out

    return WeightSource(shape, read)


def _common_shape(keys: Sequence[str], folder: WeightsReader) -> tuple[int, ...]:
    first = folder.shape(keys[0])
    for key in keys:
        if folder.shape(key) != first:
            raise ModelError(
                f"{folder.path}: {key} has shape {list(folder.shape(key))}, unlike {keys[0]} with {list(first)}"
            )
    return first
