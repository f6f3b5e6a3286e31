"""Layouts and models at which the Megatron engine is held to the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAYERS = 5
"""More than chunks of any layout, and no multiple of stages."""


@dataclass(frozen=True)
class Layout:
    """How many processes, and what the engine is told."""

    processes: int
    engine: dict[str, Any] = field(default_factory=dict)
    moe_only: bool = False
    experts_too: bool = True
    """Whether mixtures of experts run at it."""


def _sizes(**sizes: int) -> dict[str, Any]:
    return {f"{name}_parallel_size": size for name, size in sizes.items()}


_SP = {"sequence_parallel": True}

LAYOUTS: dict[str, Layout] = {
    "single": Layout(1),
    "tp2": Layout(2, _sizes(tensor=2), experts_too=False),
    "tp2 sp": Layout(2, {**_sizes(tensor=2), **_SP}),
    "pp2": Layout(2, _sizes(pipeline=2)),
    "pp4 uneven": Layout(4, _sizes(pipeline=4)),
    "pp2 vpp2": Layout(2, _sizes(pipeline=2, virtual_pipeline=2)),
    "cp2": Layout(2, _sizes(context=2)),
    "dp2": Layout(2),
    "ep2": Layout(2, _sizes(expert=2), moe_only=True),
    "tp2 pp2": Layout(4, {**_sizes(tensor=2, pipeline=2), **_SP}),
    "tp2 cp2": Layout(4, {**_sizes(tensor=2, context=2), **_SP}),
    "tp2 pp2 without sp": Layout(4, _sizes(tensor=2, pipeline=2), experts_too=False),
    "tp2 cp2 without sp": Layout(4, _sizes(tensor=2, context=2), experts_too=False),
    "pp2 dp2 distributed": Layout(4, {**_sizes(pipeline=2), "distributed_optimizer": True}),
    "pp2 ep2": Layout(4, _sizes(pipeline=2, expert=2), moe_only=True),
    "tp2 ep2": Layout(2, {**_sizes(tensor=2, expert=2), **_SP}, moe_only=True),
    "tp2 etp2": Layout(2, {**_sizes(tensor=2, expert_tensor=2), **_SP}, moe_only=True),
}
"""By the name that tests use."""

DENSE = ("llama", "llama_tied", "llama_scaled", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "qwen3_moe_dense_first", "mixtral")
FAMILIES = (*DENSE, *MIXTURES)


def fits(family: str, layout: str) -> bool:
    """Whether a model of `family` runs at the layout; the rest is refused at configuration, and tested there."""
    how = LAYOUTS[layout]
    return how.experts_too if family in MIXTURES else not how.moe_only


def settings(layout: str, **more: Any) -> dict[str, Any]:
    """`engine:` of a recipe."""
    return {"strategy": "megatron", "device": "cpu", **LAYOUTS[layout].engine, **more}
