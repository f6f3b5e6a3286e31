"""Where the tensors of a model lie in a folder or a checkpoint, under which of the spellings that are in use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.errors import ModelError
from engines.weights import PretrainedFolder
from engines_megatron.architectures import Architecture
from engines_megatron.weights.names import EMBEDDING, HEAD, SCORE, Shape, mixture_names, tensor_shapes

_BLOCK_ROWS = 4096
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Buffers that older releases of transformers saved."""


@dataclass(frozen=True)
class _Place:
    """One spelling of a tensor: the stored tensor that holds it, and where."""

    key: str
    shape: Shape
    """That the stored tensor must have."""
    expert: int | None = None
    """Index of the first dimension, if experts are stacked."""
    row: int = 0


class Source:
    """The tensors of a model by the names of `names.tensor_shapes`, read by blocks.

    Raises `ModelError` naming what is missing, unexpected or of another shape, and a tied head that is not the
    embedding. Reads headers only, apart from such a head. A value model may lack its own head, and then a language
    model's is passed over.
    """

    def __init__(self, reader: PretrainedFolder, architecture: Architecture, model_type: str) -> None:
        self._reader = reader
        self._shapes = tensor_shapes(architecture, model_type)
        self._places: dict[str, _Place] = {}
        stored, faults = reader.keys(), []
        missing = []
        for name, shape in self._shapes.items():
            place = next((place for place in _spellings(name, shape, architecture) if place.key in stored), None)
            if place is not None:
                self._places[name] = place
            elif name != SCORE:
                missing.append(name)
        used = {place.key for place in self._places.values()}
        if architecture.tied or model_type == "value_model":
            used.add(HEAD)
        unexpected = sorted(key for key in stored - used if not _NOT_WEIGHTS.search(key))
        reshaped = sorted(set(self._reshaped()))
        for fault, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", reshaped)):
            if names:
                faults.append(f"{fault}: {_some(names)}")
        if faults:
            raise ModelError(
                f"{reader.path}: the weights do not fit the {architecture.model_type} {model_type.replace('_', ' ')} "
                f"of config.json; {'; '.join(faults)}",
                "Were config.json and the weights saved together, by save_pretrained of transformers?",
            )
        if architecture.tied and model_type == "language_model":
            self._check_tied_head()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """That block of the tensor, on the CPU as stored; reads nothing else."""
        place = self._places[name]
        index = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
        index[0] = slice(index[0].start + place.row, index[0].stop + place.row)
        if place.expert is not None:
            index.insert(0, slice(place.expert, place.expert + 1))
        return self._reader.read(place.key, tuple(index)).view(tuple(shape))

    def _reshaped(self) -> Iterator[str]:
        for place in self._places.values():
            found = tuple(self._reader.shape(place.key))
            if found != place.shape:
                yield f"{place.key} has shape {list(found)}, the model's is {list(place.shape)}"

    def _check_tied_head(self) -> None:
        """Compared in blocks of rows, on every rank alike: where it fails, all of them do."""
        if not {EMBEDDING, HEAD} <= self._reader.keys():
            return
        rows = self._shapes[EMBEDDING][0]
        equal = self._reader.shape(EMBEDDING) == self._reader.shape(HEAD)
        for start in range(0, rows, _BLOCK_ROWS):
            block = (slice(start, min(rows, start + _BLOCK_ROWS)), slice(None))
            equal = equal and self._reader.read(EMBEDDING, block).equal(self._reader.read(HEAD, block))
        if not equal:
            raise ModelError(
                f"{self._reader.path}: config.json ties {HEAD} to {EMBEDDING}, yet the weights hold both, with other "
                "values",
                "Set tie_word_embeddings to false in config.json, or remove the one that is not meant.",
            )


def _spellings(name: str, shape: Shape, architecture: Architecture) -> Iterator[_Place]:
    """As `save_pretrained` writes it; then as transformers' modules name it, experts stacked; a tied head for the
    embedding."""
    yield _Place(name, shape)
    if name == EMBEDDING and architecture.tied:
        yield _Place(HEAD, shape)
    if architecture.experts is not None:
        yield from _as_modules_name_it(name, shape, architecture)


def _as_modules_name_it(name: str, shape: Shape, architecture: Architecture) -> Iterator[_Place]:
    assert architecture.experts is not None
    names, number = mixture_names(architecture), architecture.experts.number
    found = re.fullmatch(rf"(model\.layers\.\d+)\.{names.module}\.(?:experts\.(\d+)\.(\w+)|gate)\.weight", name)
    if found is None:
        return
    layer, expert, part = found.groups()
    if expert is None:
        yield _Place(f"{layer}.mlp.gate.weight", shape)
    elif part == names.down:
        yield _Place(f"{layer}.mlp.experts.down_proj", (number, *shape), int(expert))
    else:
        rows, width = shape
        stacked = (number, 2 * rows, width)
        yield _Place(f"{layer}.mlp.experts.gate_up_proj", stacked, int(expert), rows if part == names.up else 0)


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
