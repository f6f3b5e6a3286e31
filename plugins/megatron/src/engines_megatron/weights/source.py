"""Where the tensors of a model lie in a folder or a checkpoint, under whichever of the spellings in use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.models import Plan, WeightSource, check_fit, keep_one_of_tied
from engines.weights import WeightsReader
from engines_megatron.architectures import Architecture
from engines_megatron.weights.names import EMBEDDING, HEAD, SCORE, Shape, mixture_names, tensor_shapes


@dataclass(frozen=True)
class _Place:
    """One spelling of a tensor: the stored tensor that holds it, and where."""

    key: str
    shape: Shape
    """That the stored tensor must have."""
    expert: int | None = None
    """Index of its first dimension, if experts are stacked."""
    row: int = 0


def load_plan(reader: WeightsReader, architecture: Architecture, model_type: str) -> Plan:
    """A source for every tensor of the model, by the names of `tensor_shapes`.

    A value model may lack its own head; a language model's is passed over. Every rank calls it and reads headers
    only, unless a tied folder holds a head. Raises `ModelError`, on every rank, naming what is missing, unexpected
    or of another shape, and a tied head that is not the embedding.
    """
    shapes, stored = dict(tensor_shapes(architecture, model_type)), reader.keys()
    plan: Plan = {}
    used: set[str] = set()
    for name, shape in shapes.items():
        place = next((place for place in _spellings(name, shape, architecture) if place.key in stored), None)
        if place is not None:
            used.add(place.key)
            plan[name] = _source(reader, place, shape)
    if HEAD in stored and HEAD not in shapes and (architecture.tied or model_type == "value_model"):
        used.add(HEAD)
        if architecture.tied:
            plan[HEAD] = _source(reader, _Place(HEAD, shapes[EMBEDDING]), shapes[EMBEDDING])
            keep_one_of_tied(plan, kept=EMBEDDING, copy=HEAD, path=reader.path)
    if SCORE not in plan:
        shapes.pop(SCORE, None)
    kind = f"{architecture.model_type} {model_type.replace('_', ' ')}"
    check_fit(plan, shapes, stored - used, model=kind, folder=reader, used=used)
    return plan


def _source(reader: WeightsReader, place: _Place, shape: Shape) -> WeightSource:
    def read(offset: Sequence[int], size: Sequence[int]) -> Tensor:
        index = [slice(start, start + extent) for start, extent in zip(offset, size, strict=True)]
        index[0] = slice(index[0].start + place.row, index[0].stop + place.row)
        if place.expert is not None:
            index.insert(0, slice(place.expert, place.expert + 1))
        return reader.read(place.key, tuple(index)).view(tuple(size))

    found = tuple(reader.shape(place.key))
    return WeightSource(shape if found == place.shape else found, read)


def _spellings(name: str, shape: Shape, architecture: Architecture) -> Iterator[_Place]:
    """As `save_pretrained` writes it; then as transformers' modules hold it, which checkpoints are named by."""
    yield _Place(name, shape)
    if architecture.experts is None:
        return
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
        first = rows if part == names.up else 0
        yield _Place(f"{layer}.mlp.experts.gate_up_proj", (number, 2 * rows, width), int(expert), first)
