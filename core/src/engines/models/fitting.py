"""Whether stored weights are those of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import ModelError
from engines.models.conversion import WeightSource

if TYPE_CHECKING:
    from engines.weights import WeightsReader

Plan = dict[str, WeightSource]
"""Where each weight of a model comes from, by its name."""

_BUFFERS = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""What earlier releases of transformers saved beside weights."""


def keep_one_of_tied(plan: Plan, *, kept: str, copy: str, path: Path) -> None:
    """Drop the source of `copy`, or let it stand in for `kept`. Raises `ModelError` if both are there and differ."""
    if copy not in plan:
        return
    source = plan.pop(copy)
    if kept not in plan:
        plan[kept] = source
    elif not _equal(source, plan[kept]):
        raise ModelError(
            f"{path}: config.json ties {copy} to {kept}, yet the weights hold both, with other values",
            "Set tie_word_embeddings to false in config.json, or remove the one that is not meant.",
        )


def check_fit(
    plan: Mapping[str, WeightSource],
    shapes: Mapping[str, tuple[int, ...]],
    unexpected: Iterable[str],
    *,
    model: str,
    folder: WeightsReader,
    used: Iterable[str],
) -> None:
    """Raise one `ModelError` with all that does not fit.

    `shapes`: what the model `model` needs; `used`, `unexpected`: names in `folder` that are of use to it, and those
    of none.
    """
    unexpected = sorted(name for name in unexpected if not _BUFFERS.search(name))
    missing = [name for name in shapes if name not in plan]
    reshaped = [
        f"{name} has shape {list(plan[name].shape)}, the model's is {list(shape)}"
        for name, shape in shapes.items()
        if name in plan and plan[name].shape != shape
    ]
    quantized = [
        f"{name} is {str(dtype).removeprefix('torch.')}"
        for name in sorted(used)
        if not (dtype := folder.dtype(name)).is_floating_point or dtype.itemsize == 1
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": reshaped, "quantized": quantized}
    faults = [f"{fault}: {_some(names)}" for fault, names in kinds.items() if names]
    if faults:
        raise ModelError(
            f"{folder.path}: the weights do not fit the {model} of config.json; {'; '.join(faults)}",
            "Were config.json and the weights saved together, by save_pretrained of a causal language model?",
        )


def _equal(one: WeightSource, other: WeightSource) -> bool:
    """Compared in blocks of rows, so that no full copy is made."""
    if one.shape != other.shape:
        return False
    rest = one.shape[1:]
    for start in range(0, one.shape[0], 4096):
        at = (start, *(0 for _ in rest)), (min(4096, one.shape[0] - start), *rest)
        if not one.read(*at).equal(other.read(*at)):
            return False
    return True


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
