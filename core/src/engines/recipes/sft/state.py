"""What a run's checkpoints hold beside model and optimizer: enough to know that a resumed run is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.errors import CheckpointError
from engines.recipes.data import Samples
from engines.recipes.sft.config import TrainerConfig

_KEYS = {
    "mini_batch_size": "trainer.mini_batch_size",
    "shuffle": "trainer.shuffle",
    "seed": "trainer.seed",
    "num_samples": "number of samples in data.train",
    "samples": "fingerprint of data.train",
}


@dataclass
class RunState:
    """The position in the data follows from the step, if all of this is as it was."""

    mini_batch_size: int
    shuffle: bool
    seed: int
    num_samples: int
    samples: str
    skipped_in_a_row: int = 0

    @classmethod
    def of(cls, trainer: TrainerConfig, samples: Samples) -> RunState:
        """The state before the first step."""
        return cls(trainer.mini_batch_size, trainer.shuffle, trainer.seed, len(samples), samples.fingerprint())

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def restore(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        """Take over what was saved. Raises `CheckpointError`, listing what differs, if it is of other data."""
        mine = asdict(self)
        differences = [
            f"  {name}: {saved.get(key)!r} in the checkpoint, {mine[key]!r} in this run"
            for key, name in _KEYS.items()
            if saved.get(key) != mine[key]
        ]
        if differences:
            raise CheckpointError(
                f"{checkpoint} can't be resumed, since the samples would not go on where it stopped:\n"
                + "\n".join(differences),
                "Mend the recipe, or start a new run in another trainer.output_dir.",
            )
        self.skipped_in_a_row = int(saved["skipped_in_a_row"])

    def count_skipped(self, reason: str | None) -> None:
        """Note whether a step was skipped for its gradients; one without targets neither adds nor ends a row."""
        if reason == "non_finite":
            self.skipped_in_a_row += 1
        elif reason is None:
            self.skipped_in_a_row = 0
