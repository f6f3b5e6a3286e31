"""The engine under test: what it declares, and at which layouts and on which models that is held against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.config import EngineConfig, ModelConfig
from engines.configuring import validate
from engines.errors import EngineNotFound, EnginesError
from engines.loading import load_config_class
from engines.registry import registry
from engines.selection import Selection
from engines.testing.conformance import Conformance
from engines.testing.layouts import SINGLE, Layout, declared_layouts
from engines.testing.world import set_up

LAYERS = 4
"""Of the kit's models where a layout has several stages: as many as the chunks of any."""
FEWER_LAYERS = 2
"""Of the others."""
DENSE = ("llama_tied", "llama", "qwen2", "qwen3")
MIXTURES = ("qwen3_moe", "mixtral")
"""Models that the kit knows, in the order in which it prefers them; an engine must build one of them at least."""


@dataclass(frozen=True)
class Subject:
    """An engine on a device, and everything of the kit that fits it."""

    selection: Selection
    config: type[EngineConfig]
    folders: Mapping[str, Path]
    """A folder with each model's config.json, to ask the engine whether it builds it."""
    setup: str | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    """What its `EngineConfig.check` said to models and to combinations of layouts."""

    @property
    def name(self) -> str:
        """As the report calls it."""
        return f"{self.selection.backend} on {self.selection.device}"

    @property
    def capabilities(self) -> frozenset[str]:
        """What it declares."""
        return self.selection.capabilities

    @property
    def layers(self) -> int:
        """Of the models that it is tested with."""
        return LAYERS if "pipeline_parallel" in self.capabilities else FEWER_LAYERS

    def settings(self, layout: Layout = SINGLE, **more: Any) -> dict[str, Any]:
        """`engine:` of a recipe."""
        owner = f"{self.selection.backend}@{self.selection.distribution}"
        return {"strategy": owner, "device": self.selection.device, **layout.settings, **more}

    @cached_property
    def families(self) -> tuple[str, ...]:
        """The dense models that it builds, the one that most clauses use first."""
        found = tuple(family for family in DENSE if self._takes(family, SINGLE))
        assert found, f"{self.name} builds none of the kit's models: {self.refusals}"
        return found

    @cached_property
    def mixtures(self) -> tuple[str, ...]:
        """The mixtures of experts that it builds."""
        return tuple(family for family in MIXTURES if self._takes(family, SINGLE))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Those that it declares, less the combinations that it refuses."""
        declared = declared_layouts(self.capabilities, self.config)
        return tuple(one for one in declared if not one.is_combination or self._takes(self.family_at(one), one))

    def family_at(self, layout: Layout) -> str:
        """The model that clauses use at a layout."""
        if not layout.mixture:
            return self.families[0]
        assert self.mixtures, f"{self.name} declares {layout.name}, but builds none of {MIXTURES}: {self.refusals}"
        return self.mixtures[0]

    def refuses(self, folder: Path, layout: Layout) -> str | None:
        """What its `EngineConfig.check` says against the model in `folder` at a layout; None if it takes it."""
        config = validate(self.config, self.settings(layout), where="engine")
        try:
            config.check(ModelConfig(path=str(folder)), model_type="language_model", world_size=layout.processes)
        except EnginesError as refusal:
            return str(refusal)
        return None

    def _takes(self, family: str, layout: Layout) -> bool:
        refusal = self.refuses(self.folders[family], layout)
        if refusal is not None:
            self.refusals[family if layout is SINGLE else layout.name] = refusal
        return refusal is None


def find(asked: Conformance, scratch: Path) -> Subject:
    """The engine that is asked for. Raises `EngineNotFound`, with every candidate and why it was left."""
    if asked.setup is not None:
        set_up(asked.setup)
    selection = resolve(asked.engine, asked.device)
    folders = {family: scratch / family for family in (*DENSE, *MIXTURES)}
    for family, folder in folders.items():
        _write_config(family, folder)
    return Subject(selection, load_config_class(selection), folders, asked.setup)


def resolve(engine: str, device: str | None) -> Selection:
    """The language model's engine on `device`; None: on the cpu if it runs there, else where the registry says."""
    if device is not None:
        return registry.resolve("language_model", engine, device)
    try:
        return registry.resolve("language_model", engine, "cpu")
    except EngineNotFound:
        return registry.resolve("language_model", engine)


def _write_config(family: str, folder: Path) -> None:
    from engines.testing.tiny import tiny_config

    tiny_config(family, num_hidden_layers=LAYERS).save_pretrained(folder)
