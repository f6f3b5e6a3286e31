"""Which samples a step takes: an endless stream of epochs, whose position follows from the step alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class SampleOrder:
    """The endless stream of samples 0 to n - 1, epoch after epoch, each in an order of its own if shuffled.

    Nothing moves: asking for a step twice gives the same answer, so a resumed run needs no saved position.
    """

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        assert num_samples > 0
        self.num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def step(self, step: int, mini_batch_size: int) -> list[int]:
        """Samples of step `step`, counted from 1, which may span two epochs or more."""
        start = (step - 1) * mini_batch_size
        return [self._sample(position) for position in range(start, start + mini_batch_size)]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self.num_samples)
        return int(self._epoch(epoch)[index]) if self._shuffle else index

    def _permutation(self, epoch: int) -> np.ndarray:
        # RandomState, since its stream is frozen for all versions of numpy; that of Generator is not
        return np.random.RandomState([self._seed, epoch]).permutation(self.num_samples)
