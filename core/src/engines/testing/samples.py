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
"""Lengths of the samples of three mini-batches, from 2 to 100; those that follow have them again."""
LONGEST = max(map(max, LENGTHS))
MASKED, SINGLE = 4, 6
"""In each mini-batch, the place of the sample without any target and of the one with a single target."""


def mini_batches(
    size: int = 8, *, seed: int = 3, steps: int = len(LENGTHS), vocab: int = VOCAB, longest: int = LONGEST
) -> list[list[Sample]]:
    """A mini-batch for each of `steps`, of `size` samples whose shares of targets differ from sample to sample.

    `longest`: no sample has more tokens, for models that take no more; 2 at least.
    """
    draw = random.Random(seed)
    rows = [LENGTHS[step % len(LENGTHS)][:size] for step in range(steps)]
    return [
        [_sample(min(length, longest), place, draw, vocab) for place, length in enumerate(lengths)]
        for lengths in rows
    ]


def masked(samples: list[Sample]) -> list[Sample]:
    """The same samples without any target."""
    return [Sample(sample.input_ids, [False] * len(sample.input_ids)) for sample in samples]


def _sample(length: int, place: int, draw: random.Random, vocab: int) -> Sample:
    ids = [draw.randrange(vocab) for _ in range(length)]
    if place == MASKED:
        return Sample(ids, [False] * length)
    if place == SINGLE:
        return Sample(ids, [i == length // 2 for i in range(length)])
    share = 0.25 + 0.7 * draw.random()
    mask = [draw.random() < share for _ in range(length)]
    mask[0] = mask[1] = True
    return Sample(ids, mask)
