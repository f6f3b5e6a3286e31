"""engines: LLM post-training (SFT, GRPO, PPO) on any training backend, chosen by one word.

The public names load lazily, so that `import engines` costs nothing and imports neither torch nor any plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "engines.batch": ("Batch", "TokenOutputs"),
    "engines.config": ("EngineConfig", "ModelConfig", "OptimizerConfig"),
    "engines.contract": ("BaseEngine", "hookimpl"),
    "engines.engine": ("Engine", "create"),
    "engines.errors": ("EnginesError",),
    "engines.losses": ("Loss", "SFTLoss"),
    "engines.worker": ("TrainingWorker", "auto_select"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BaseEngine",
    "Batch",
    "Engine",
    "EngineConfig",
    "EnginesError",
    "Loss",
    "ModelConfig",
    "OptimizerConfig",
    "SFTLoss",
    "TokenOutputs",
    "TrainingWorker",
    "auto_select",
    "create",
    "hookimpl",
]

if TYPE_CHECKING:
    from engines.batch import Batch, TokenOutputs
    from engines.config import EngineConfig, ModelConfig, OptimizerConfig
    from engines.contract import BaseEngine, hookimpl
    from engines.engine import Engine, create
    from engines.errors import EnginesError
    from engines.losses import Loss, SFTLoss
    from engines.worker import TrainingWorker, auto_select


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'engines' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
