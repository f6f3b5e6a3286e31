"""Whether MindSpeed's patches are in: what can be seen of them in Megatron-Core.

Imported too late, MindSpeed raises nothing: what Megatron decides while it is imported, and classes that it builds
then, simply stay as they were.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

SPECS = "megatron.core.models.gpt.gpt_layer_specs"
OPTIMIZER = "megatron.core.optimizer"
ATTENTION = "megatron.core.transformer.dot_product_attention"
MANAGER = "mindspeed.patch_utils"


def unpatched() -> list[str]:
    """What is as Megatron-Core has it and not as MindSpeed leaves it; empty if all patches are in."""
    found = []
    if not getattr(import_module(SPECS), "HAVE_TE", False):
        found.append(f"{SPECS}.HAVE_TE is not true")
    adam = getattr(import_module(OPTIMIZER), "Adam", None)
    if not is_mindspeeds(adam):
        found.append(f"{OPTIMIZER}.Adam is {_origin(adam)}'s")
    patches = applied()
    if not patches:
        found.append(f"{MANAGER} registers no patch")
    waiting = sorted(name for name, done in patches.items() if not done)
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        found.append(f"the patch of {waiting[0]}{more} is not applied")
    return found


def applied() -> dict[str, bool]:
    """Every patch that MindSpeed has registered, by the dotted name that it patches, and whether it is in."""
    manager = getattr(import_module(MANAGER), "MindSpeedPatchesManager", None)
    patches = getattr(manager, "patches_info", {})
    return {name: bool(patch.is_applied) for name, patch in patches.items()}


def attention_is_mindspeeds() -> bool:
    """Whether Megatron's plain core attention is computed by MindSpeed: by its forward, or by a class of its own."""
    attention = import_module(ATTENTION).DotProductAttention
    return is_mindspeeds(attention) or is_mindspeeds(attention.forward)


def is_mindspeeds(thing: object) -> bool:
    """Whether a class or function is defined in MindSpeed."""
    return _origin(thing).partition(".")[0] == "mindspeed"


def _origin(thing: Any) -> str:
    return str(getattr(thing, "__module__", None))
