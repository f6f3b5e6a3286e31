"""From a selection to a live engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from engines.config import EngineConfig, ModelConfig, OptimizerConfig
from engines.configuring import check_capabilities, check_processes, validate
from engines.contract import EngineContext
from engines.devices import DeviceSpec
from engines.engine.binding import EnginePluginManager, check_engine_class, check_wrapper
from engines.engine.facade import Engine
from engines.errors import ConfigError, LaunchError
from engines.loading import load
from engines.registry import Selection, registry


def create(
    model: ModelConfig | Mapping[str, Any],
    engine: EngineConfig | Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    *,
    model_type: str = "language_model",
    total_steps: int | None = None,
    selection: Selection | None = None,
    wrappers: Iterable[object] = (),
) -> Engine:
    """Choose, load, check and construct an engine; call `initialize` on what it returns.

    `engine`: the chosen engine's settings; a mapping is validated by the plugin's own config class. Without
    `optimizer` the engine only infers. All ranks call this, after `torch.distributed` is initialised (if the
    run has several processes). Raises `EngineNotFound`, `BrokenPlugin`, `ConfigError`, `ContractError`, or what the
    engine's own `EngineConfig.check` has to say, before anything heavy happens.
    """
    model = model if isinstance(model, ModelConfig) else validate(ModelConfig, model, where="model")
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
        optimizer = validate(OptimizerConfig, optimizer, where="optimizer")
    settings = engine.model_dump(exclude_unset=True) if isinstance(engine, EngineConfig) else dict(engine or {})
    if selection is None:
        selection = registry.resolve(model_type, settings.get("strategy"), configured=settings.get("device"))
    loaded = load(selection)
    config = validate(loaded.config_class, settings, where="engine")
    name = f"{selection.backend} on {selection.device} ({selection.distribution})"
    capabilities = selection.capabilities
    check_capabilities(config, model, engine=name, capabilities=capabilities, others=registry.engines_with)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config.check(model, model_type=model_type, world_size=world_size)
    check_processes(config, world_size, engine=name, capabilities=capabilities, others=registry.engines_with)
    _check_schedule(optimizer, total_steps)
    check_engine_class(loaded.engine_class, selection.capabilities, selection.distribution)
    wrappers = tuple(wrappers)
    for wrapper in wrappers:  # again in `wrap`; here nothing has been made yet that must be closed
        check_wrapper(wrapper)
    manager = EnginePluginManager()
    ctx = EngineContext(
        model_type,
        model,
        config,
        optimizer,
        total_steps,
        local_device(selection),
        selection.capabilities,
        manager.hook,
    )
    base = loaded.engine_class(ctx)
    manager.register(base)
    made = Engine(base, manager, ctx, selection)
    made.wrap(*wrappers)
    return made


def local_device(selection: Selection) -> torch.device:
    """This process's device: the one of its LOCAL_RANK on accelerators.

    Imports the module that makes torch know the device. Raises `LaunchError` if that fails, or if torch sees fewer.
    """
    spec = selection.device_spec
    try:
        import_module(spec.module)
    except (Exception, SystemExit) as error:  # an import runs anybody's code
        cause = f"{type(error).__name__}: {error}"
        raise LaunchError(
            f'device "{spec.name}" needs the module {spec.module}, which cannot be imported: {cause}',
            spec.toolkit or f"Install the package that brings {spec.module}, and what it needs.",
        ) from error
    if spec.torch_device == "cpu":
        return torch.device("cpu")
    index, seen = int(os.environ.get("LOCAL_RANK", "0")), _count_devices(spec)
    if index >= seen:
        install = spec.toolkit or f"Install the driver, and a torch that is built for {spec.name}."
        raise LaunchError(
            f"local rank {index} needs a {spec.name} device of its own, and torch sees {seen}",
            f"Start at most {seen} processes on this machine." if seen else install,
        )
    return torch.device(spec.torch_device, index)


def _count_devices(spec: DeviceSpec) -> int:
    try:
        module = torch.get_device_module(spec.torch_device)
    except RuntimeError:  # torch knows no device of that name, although its module was imported
        return 0
    return int(module.device_count())


def _check_schedule(optimizer: OptimizerConfig | None, total_steps: int | None) -> None:
    if optimizer is not None and optimizer.schedule != "constant" and total_steps is None:
        raise ConfigError(
            f"optimizer.schedule: {optimizer.schedule!r} decays to 0 at the last step, whose number is unknown",
            "give total_steps, or use 'constant'",
        )
