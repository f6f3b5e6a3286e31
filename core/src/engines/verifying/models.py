"""The models that engines are run on: a folder of somebody's, or tiny ones with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from engines.errors import EnginesError
from engines.model_folder import read_config
from engines.recipes.model_folder import inspect_model
from engines.testing.layouts import Layout
from engines.testing.subject import DENSE, MIXTURES, Subject

_LENGTHS = ("max_position_embeddings", "n_positions")
"""Keys of config.json for the most tokens that a model takes."""
SHORTEST = 2


@dataclass(frozen=True)
class Model:
    """A model folder, and what may be fed to it."""

    name: str
    folder: Path
    vocab: int
    longest: int | None
    """The most tokens of a sample; None: it doesn't say."""

    @classmethod
    def at(cls, folder: Path, name: str) -> Model:
        """What lies in `folder`. Raises `ModelError`, `CheckpointError` where that is no language model."""
        found, config = inspect_model(folder, "language_model"), read_config(folder)
        lengths = [config[key] for key in _LENGTHS if type(config.get(key)) is int and config[key] >= SHORTEST]
        return cls(name, folder, found.vocab_size, min(lengths, default=None))


class Models(Protocol):
    """Finds a model for an engine at a layout."""

    def choose(self, subject: Subject, layout: Layout) -> Model | str:
        """The model, or why the engine takes none."""
        ...


class OwnModel:
    """The same folder for everything."""

    def __init__(self, folder: Path) -> None:
        """Raises `EnginesError` where it holds no language model."""
        try:
            self._model = Model.at(folder, str(folder))
        except EnginesError as error:  # what it calls model.path is called so by recipes
            raise type(error)(error.message.replace("model.path:", "--model:"), error.remedy) from None

    def choose(self, subject: Subject, layout: Layout) -> Model | str:
        """The folder, or what the engine says against it."""
        return subject.refuses(self._model.folder, layout) or self._model


class TinyModels:
    """A dense one, and a mixture of experts for the layouts that shard experts: the first that an engine takes."""

    def __init__(self, make: Callable[[], Mapping[str, Path]]) -> None:
        """`make`: writes those of all families, when the first is needed."""
        self._make = make

    @cached_property
    def _models(self) -> Mapping[str, Model]:
        return {family: Model.at(folder, f"tiny {family}") for family, folder in self._make().items()}

    def choose(self, subject: Subject, layout: Layout) -> Model | str:
        """A model, or what the engine says against the first."""
        refusals = []
        for family in MIXTURES if layout.mixture else DENSE:
            refusal = subject.refuses(self._models[family].folder, layout)
            if refusal is None:
                return self._models[family]
            refusals.append(refusal)
        return refusals[0]
