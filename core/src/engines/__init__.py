"""engines: LLM post-training (SFT, GRPO, PPO) on any training backend, chosen by one word.

The public names load lazily, so that `import engines` costs nothing and imports neither torch nor any plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "BaseEngine": "engines.contract",
    "Batch": "engines.batch",
    "Engine": "engines.engine",
    "EngineConfig": "engines.config",
    "EnginesError": "engines.errors",
    "Loss": "engines.losses",
    "ModelConfig": "engines.config",
    "OptimizerConfig": "engines.config",
    "SFTLoss": "engines.losses",
    "TokenOutputs": "engines.batch",
    "TrainingWorker": "engines.worker",
    "create": "engines.engine",
    "hookimpl": "engines.contract",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (a list of str; it can't be written out without repeating _HOMES)

if TYPE_CHECKING:
    from engines.batch import Batch, TokenOutputs
    from engines.config import EngineConfig, ModelConfig, OptimizerConfig
    from engines.contract import BaseEngine, hookimpl
    from engines.engine import Engine, create
    from engines.errors import EnginesError
    from engines.losses import Loss, SFTLoss
    from engines.worker import TrainingWorker


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engines' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
