"""TensorBoard and Weights & Biases, if a recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from engines.errors import ConfigError


class RunLogger(Protocol):
    """Somewhere else where the figures of steps go."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """A step's figures, finite ones only."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


def check_installed(names: Iterable[str]) -> None:
    """Raise `ConfigError` for a logger whose package isn't installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trainer.loggers: {name} is not installed",
                f"Install it with `pip install {name}`, or take it out of trainer.loggers.",
            )


def make_loggers(
    names: Iterable[str], output_dir: Path, *, steps_done: int, recipe: Mapping[str, Any]
) -> list[RunLogger]:
    """Open the named loggers; steps after `steps_done`, of an earlier attempt, are dropped where that can be."""
    makers: dict[str, Callable[[Path, int, Mapping[str, Any]], RunLogger]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    return [makers[name](output_dir, steps_done, recipe) for name in names]


class TensorBoard:
    """Event files in tensorboard/."""

    def __init__(self, output_dir: Path, steps_done: int, recipe: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=steps_done + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Each figure as a scalar."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, the same one after a resume; its own environment variables say which project."""

    def __init__(self, output_dir: Path, steps_done: int, recipe: Mapping[str, Any]) -> None:
        import wandb
        import xxhash

        identity = xxhash.xxh3_64_hexdigest(str(output_dir.resolve()).encode())
        self._run = wandb.init(
            dir=str(output_dir), name=output_dir.name, id=identity, resume="allow", config=dict(recipe)
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """All figures of the step at once."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
