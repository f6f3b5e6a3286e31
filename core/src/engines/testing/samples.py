"""Samples for comparisons with the reference: awkward on purpose."""

from __future__ import annotations

import random

from engines.testing.plain import Sample
from engines.testing.tiny import VOCAB

LENGTHS = (
    (37, 2, 100, 5, 64, 11, 23, 80),
    (3, 91, 17, 2, 55, 8, 42, 29),
    (70, 12, 6, 97, 2, 33, 19, 48),
)
"""Lengths of the samples of three mini-batches, from 2 to 100."""
MASKED, SINGLE = 4, 6
"""In each mini-batch, the place of the sample without any target and of the one with a single target."""


def mini_batches(size: int = 8, *, seed: int = 3) -> list[list[Sample]]:
    """Three mini-batches of `size` samples, whose shares of targets differ from sample to sample."""
    draw = random.Random(seed)
    return [[_sample(length, place, draw) for place, length in enumerate(row[:size])] for row in LENGTHS]


def masked(samples: list[Sample]) -> list[Sample]:
    """The same samples without any target."""
    return [Sample(sample.input_ids, [False] * len(sample.input_ids)) for sample in samples]


def _sample(length: int, place: int, draw: random.Random) -> Sample:
    ids = [draw.randrange(VOCAB) for _ in range(length)]
    if place == MASKED:
        return Sample(ids, [False] * length)
    if place == SINGLE:
        return Sample(ids, [i == length // 2 for i in range(length)])
    share = 0.25 + 0.7 * draw.random()
    mask = [draw.random() < share for _ in range(length)]
    mask[0] = mask[1] = True
    return Sample(ids, mask)
