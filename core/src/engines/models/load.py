"""From the tensors of a Hugging Face folder or a checkpoint to a model's weights, each rank reading its own rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from engines.models.conversion import Sources, WeightSource, weight_sources
from engines.models.export import named_weights
from engines.models.fitting import check_fit, keep_one_of_tied

if TYPE_CHECKING:
    from engines.weights import WeightsReader


def load_plan(model: Any, folder: WeightsReader) -> dict[str, WeightSource]:
    """A source for every weight of a transformers `model` that `named_weights` names.

    Called on every rank, before or after sharding; reads headers only. In a checkpoint, names may be the model's own
    or those of its Hugging Face folder. Raises `ModelError` naming keys that are missing, unexpected or of another
    shape, and a tied weight that the folder holds twice with other values.
    """
    weights = dict(named_weights(model))
    groups, unexpected = _assign(model, folder)
    plan: dict[str, WeightSource] = {}
    for sources in groups.values():
        plan |= weight_sources(model, folder, sources)
    for copy, kept in model.all_tied_weights_keys.items():
        if copy not in weights:
            keep_one_of_tied(plan, kept=kept, copy=copy, path=folder.path)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    check_fit(
        plan,
        {name: tuple(weight.shape) for name, weight in weights.items()},
        (key for key in unexpected if not any(re.search(pattern, key) for pattern in ignored)),
        model=type(model).__name__,
        folder=folder,
        used=(key for sources in groups.values() for key in sources.all_keys()),
    )
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
