"""The layouts at which an engine is held to the contract: those for which it declares the capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.config import EngineConfig, capability_of

MAX_PROCESSES = 4


@dataclass(frozen=True)
class Layout:
    """How many processes, and what the engine is told."""

    name: str
    processes: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `engine:` in a recipe."""
    needs: frozenset[str] = frozenset()
    """Capabilities that an engine must declare for it."""
    mixture: bool = False
    """Whether it is one for mixtures of experts alone."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_combination(self) -> bool:
        """Whether it joins several ways to be parallel, each of which is a layout by itself: an engine that declares
        them may still refuse the combination.
        """
        return " x " in self.name


def _layout(name: str, processes: int, *needs: str, mixture: bool = False, **settings: Any) -> Layout:
    return Layout(name, processes, settings, frozenset(needs), mixture)


SINGLE = Layout("single")
_SP: dict[str, Any] = {"sequence_parallel": True}

LAYOUTS = (
    SINGLE,
    _layout("dp2", 2, "data_parallel"),
    _layout("hsdp2", 2, "data_parallel", "hybrid_shard", data_parallel_replicate_size=2),
    _layout("tp2", 2, "tensor_parallel", tensor_parallel_size=2),
    _layout("tp2 sp", 2, "tensor_parallel", "sequence_parallel", tensor_parallel_size=2, **_SP),
    _layout("pp2", 2, "pipeline_parallel", pipeline_parallel_size=2),
    _layout(
        *("pp2 vpp2", 2, "pipeline_parallel", "virtual_pipeline_parallel"),
        pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=2,
    ),
    _layout("cp2", 2, "context_parallel", context_parallel_size=2),
    _layout("ep2", 2, "expert_parallel", mixture=True, expert_parallel_size=2),
    _layout(
        *("tp2 sp etp2", 2, "tensor_parallel", "sequence_parallel", "expert_tensor_parallel"),
        **{"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2, **_SP},
        mixture=True,
    ),
    _layout("hsdp2 x dp2", 4, "data_parallel", "hybrid_shard", data_parallel_replicate_size=2),
    _layout(
        *("tp2 sp x dp2", 4, "tensor_parallel", "sequence_parallel", "data_parallel"),
        **{"tensor_parallel_size": 2, **_SP},
    ),
    _layout("pp2 x dp2", 4, "pipeline_parallel", "data_parallel", pipeline_parallel_size=2),
    _layout("cp2 x dp2", 4, "context_parallel", "data_parallel", context_parallel_size=2),
    _layout(
        *("tp2 sp x pp2", 4, "tensor_parallel", "sequence_parallel", "pipeline_parallel"),
        **{"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **_SP},
    ),
    _layout(
        *("tp2 x cp2", 4, "tensor_parallel", "context_parallel"),
        tensor_parallel_size=2,
        context_parallel_size=2,
    ),
)
"""By how many processes they take; names that hold " x " are combinations."""


def declared_layouts(capabilities: frozenset[str], config: type[EngineConfig]) -> Iterator[Layout]:
    """The layouts whose capabilities an engine declares, its config's own switches among them."""
    yield from (layout for layout in LAYOUTS if layout.needs <= capabilities)
    if {"distributed_optimizer", "data_parallel"} <= capabilities:
        switch = switch_of("distributed_optimizer", config)
        yield _layout("dp2 distributed", 2, "distributed_optimizer", "data_parallel", **{switch: True})


def switch_of(capability: str, config: type[EngineConfig]) -> str:
    """The setting of `config` that needs `capability`, one that is true or false."""
    for name, info in config.model_fields.items():
        if capability_of(info) == capability and info.annotation is bool:
            return name
    raise AssertionError(
        f"{capability} is declared, but no field of {config.__name__} that is true or false names it: "
        f"write `field: bool = needs({capability!r}, False, ...)`"
    )
