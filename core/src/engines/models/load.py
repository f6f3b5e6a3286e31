"""From the tensors of a Hugging Face folder or a checkpoint to a model's weights, each rank reading its own rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.errors import ModelError
from engines.models.conversion import Sources, WeightSource, weight_sources

if TYPE_CHECKING:
    from engines.models.causal_lm import PackedCausalLM
    from engines.weights import WeightsReader


def load_plan(model: PackedCausalLM, folder: WeightsReader) -> dict[str, WeightSource]:
    """A source for every weight that `model.named_weights` names.

    Called on every rank, before or after sharding; reads headers only. In a checkpoint, names may be the model's own
    or those of its Hugging Face folder. Raises `ModelError` naming keys that are missing, unexpected or of another
    shape, and a tied weight that the folder holds twice with other values.
    """
    weights = dict(model.named_weights())
    groups, unexpected = _assign(model.model, folder)
    plan: dict[str, WeightSource] = {}
    for sources in groups.values():
        plan |= weight_sources(model.model, folder, sources)
    _keep_one_of_tied(plan, weights, model.model, folder)
    _complain(plan, weights, unexpected, model.model, folder)
    return {name: plan[name] for name in weights}


def _assign(model: Any, folder: WeightsReader) -> tuple[dict[str, Sources], set[str]]:
    """The folder's keys grouped by the weight that they make, as `from_pretrained` does; and those of no weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    weights, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Sources] = {}
    unexpected = set()
    for key in sorted(folder.keys(), key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, weights)
        if target not in weights and key in weights:
            target, pattern = rename_source_key(key, [], [], prefix, weights)
        if target not in weights:
            unexpected.add(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, Sources(target, converter)).add(pattern or target, key)
    if not folder.is_checkpoint:
        # what the export reverses: only what this folder needed
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]
    return groups, unexpected


def _keep_one_of_tied(
    plan: dict[str, WeightSource], weights: Mapping[str, Tensor], model: Any, folder: WeightsReader
) -> None:
    """Drop a tied weight's second copy if the folder holds one."""
    for copy, kept in model.all_tied_weights_keys.items():
        if copy in weights or copy not in plan:
            continue
        source = plan.pop(copy)
        if kept not in plan:
            plan[kept] = source
        elif not _equal(source, plan[kept]):
            raise ModelError(
                f"{folder.path}: config.json ties {copy} to {kept}, yet the weights hold both, with other values",
                "Set tie_word_embeddings to false in config.json, or remove the one that is not meant.",
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


def _complain(
    plan: Mapping[str, WeightSource],
    weights: Mapping[str, Tensor],
    unexpected: Collection[str],
    model: Any,
    folder: WeightsReader,
) -> None:
    """Raise one `ModelError` with all that does not fit."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    unexpected = [key for key in unexpected if not any(re.search(pattern, key) for pattern in ignored)]
    missing = [name for name in weights if name not in plan]
    reshaped = [
        f"{name} has shape {list(plan[name].shape)}, the model's is {list(weight.shape)}"
        for name, weight in weights.items()
        if name in plan and plan[name].shape != tuple(weight.shape)
    ]
    faults = [
        *([f"missing: {_some(missing)}"] if missing else []),
        *([f"unexpected: {_some(sorted(unexpected))}"] if unexpected else []),
        *([f"wrong shape: {_some(reshaped)}"] if reshaped else []),
    ]
    if faults:
        raise ModelError(
            f"{folder.path}: the weights do not fit the {type(model).__name__} of config.json; " + "; ".join(faults),
            "Were config.json and the weights saved together, by save_pretrained of a causal language model?",
        )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
