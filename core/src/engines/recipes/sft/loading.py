"""From layers of YAML to a validated recipe and the engine that it means; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.config import EngineConfig, ModelConfig
from engines.configuring import check_capabilities, lack, validate
from engines.errors import CapabilityError, ConfigError
from engines.loading import load_config_class
from engines.recipes.sft.config import SFTRecipe
from engines.registry import registry
from engines.selection import Selection

MODEL_TYPE = "language_model"


def build_recipe(data: Mapping[str, Any]) -> tuple[SFTRecipe, Selection]:
    """Validate a recipe, its engine's part by the chosen engine's own class.

    The recipe that returns names the strategy and the device that were chosen, so that every rank, and who reads
    recipe.yaml, means the same. Raises `ConfigError` with one line per fault over all parts, `EngineNotFound`.
    """
    faults: list[str] = []
    rest = _without_faults(faults, lambda: validate(SFTRecipe, {**data, "engine": {}}))
    engine: tuple[EngineConfig, Selection] | None = _without_faults(faults, lambda: _engine(data.get("engine")))
    if faults or rest is None or engine is None:
        raise ConfigError("\n".join(faults))
    config, selection = engine
    model: ModelConfig = rest.model
    check_capabilities(
        config,
        model,
        engine=selection.backend,
        capabilities=selection.capabilities,
        others=registry.engines_with,
        switches={f"trainer.{name}": name for name in ("export", "deterministic") if getattr(rest.trainer, name)},
    )
    if "huggingface" in rest.trainer.checkpoint_contents and "export" not in selection.capabilities:
        lacks = lack("export", selection.backend, registry.engines_with)
        raise CapabilityError(f"trainer.checkpoint_contents: 'huggingface' {lacks}. Leave it out.")
    return rest.model_copy(update={"engine": config}), selection


def _engine(section: Any) -> tuple[EngineConfig, Selection]:
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"engine: must hold keys of its own, got {section!r}")
    settings = dict(section or {})
    strategy, device = (_word(settings, key) for key in ("strategy", "device"))
    selection = registry.resolve(MODEL_TYPE, strategy, configured=device)
    config = validate(load_config_class(selection), settings, where="engine")
    chosen = {"strategy": strategy or selection.backend, "device": selection.device}
    assert isinstance(config, EngineConfig)
    return config.model_copy(update=chosen), selection


def _word(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"engine.{key}: must be a string, got {value!r}")
    return value


def _without_faults(faults: list[str], build: Any) -> Any:
    """What `build` returns; its faults are collected instead, so that the user reads about all of them at once."""
    try:
        return build()
    except ConfigError as error:
        faults.append(str(error))
        return None
