"""From a transformers model's weights to the tensors that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of a transformers model, tied ones once, and of saved buffers."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@dataclass(frozen=True)
class ExportGroup:
    """Weights that become tensors of the folder together: almost always one, as it is.

    A fused one becomes many (experts, one by one); some architectures fuse many into one.
    """

    names: tuple[str, ...]
    """Weights of `named_weights`, all needed in full."""
    model: Any

    def tensors(self, full: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) pairs from the full tensors of `names`, on their device, in their dtype."""
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self.model, {name: full[name] for name in self.names}).items())


def export_plan(model: Any) -> list[ExportGroup]:
    """The groups in which a transformers `model` is exported, in the order of its weights.

    Together they give the names, shapes and dtypes that `save_pretrained` of the model would write: a tied head
    is left out, experts come one by one. Every rank gets the same list; call it after `load_plan`, which learns
    from the folder how its tensors are laid out, or transformers' `from_pretrained`.
    """
    from transformers.core_model_loading import apply_converters, apply_renamings

    renamings, converters = _reversed_conversions(model)
    ignored = set(model._keys_to_ignore_on_save or ())
    groups: dict[str, list[str]] = {}
    for name, _ in named_weights(model):
        if name in ignored:
            continue
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
        groups.setdefault(target, []).append(name)
    return [ExportGroup(tuple(names), model) for names in groups.values()]


def _reversed_conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """transformers' own reversal, up to the point where it needs every tensor at once."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in conversions if not isinstance(entry, PrefixChange)]
    reverse = [entry.reverse_transform() for entry in conversions[::-1]]
    return (
        [entry for entry in reverse if isinstance(entry, WeightRenaming)],
        [entry for entry in reverse if isinstance(entry, WeightConverter)],
    )
