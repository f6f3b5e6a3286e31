"""Parts of nearly equal work.

Longest first (Graham 1969: each item, heaviest first, goes to the lightest part), then moves and swaps out of
the heaviest part for as long as they make it lighter. Everything is decided by weights and, among equals, by
index, so that ranks which see the same lengths make the same parts without talking to each other.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

Unit = tuple[int, ...]
"""Indices of samples that stay together, ascending; mostly one sample alone."""

Fits = Callable[[Sequence[int]], bool]
"""Whether these units may share a part. Monotone: a part that fits still does without some of its units."""

CLOSE_ENOUGH = 1.0005
"""Heaviest part over its lower bound at which improving stops: no step is measurably faster for less."""

ROUNDS_PER_PART = 16
"""Most moves and swaps, times the number of parts; an end for inputs that improve in ever smaller steps."""


def work(length: int) -> float:
    """Cost of a sequence of `length` tokens: n + n * n / 4096, in tokens of a very short sequence.

    Matrix products cost the same for every token; attention adds a share that grows with the length, in a
    transformer of hidden size h about n / (6 * h) (4nh to 24hh operations a token and layer). 6 * h = 4096 is
    a small model; the number is fixed so that a plan depends on the lengths alone. All values are multiples
    of 1/4096, which floats add up exactly and therefore in any order.
    """
    return length + length * length / 4096


def balance(
    weights: Sequence[float], num_parts: int, *, groups: Sequence[int | str] | None = None
) -> list[list[int]]:
    """Deal items out to `num_parts` parts of nearly equal weight; return each part's indices, ascending.

    `weights`: one per item, not negative. `groups`: one label per item; equal labels stay together.
    A part is empty only where there are fewer items (or groups) than parts. Near to the optimum: the heaviest
    part is at most 4/3 of it (what longest first guarantees), with many items within a percent of
    max(mean weight of a part, heaviest item or group).
    """
    assert num_parts > 0, f"{num_parts} parts"
    units = units_of(len(weights), groups)
    unit_weights = weights_of(units, weights)
    parts = longest_first(heaviest_first(unit_weights), unit_weights, num_parts)
    assert parts is not None, "without limits everything fits"
    improve(parts, unit_weights)
    return [samples_of(part, units) for part in parts]


def split_over_ranks(
    lengths: Sequence[int], num_ranks: int, *, groups: Sequence[int | str] | None = None
) -> list[list[int]]:
    """Deal a mini-batch out to data-parallel ranks, balanced by `work`; return each one's indices, ascending.

    `lengths`: tokens of every sample of the whole mini-batch. Each rank (or a single controller) calls it
    before the batch is cut, with the same arguments. Ranks may get different counts of samples, and none
    where there are too few. `groups` as in `balance`: answers to one prompt, the pair of a preference loss.
    """
    return balance([work(length) for length in lengths], num_ranks, groups=groups)


def units_of(num_samples: int, groups: Sequence[int | str] | None) -> list[Unit]:
    """What is dealt out as a whole: each sample alone, or each group; in order of their first samples."""
    if groups is None:
        return [(index,) for index in range(num_samples)]
    assert len(groups) == num_samples, f"{len(groups)} group labels for {num_samples} samples"
    members: dict[int | str, list[int]] = {}
    for index, label in enumerate(groups):
        # A tensor would be a key too, but one that equals only itself.
        assert isinstance(label, int | str), f"group label {label!r} is no int or str"
        members.setdefault(label, []).append(index)
    return [tuple(indices) for indices in members.values()]


def weights_of(units: Sequence[Unit], weights: Sequence[float]) -> list[float]:
    """Weight of each unit: the sum over its samples."""
    return [sum(weights[index] for index in unit) for unit in units]


def samples_of(part: Sequence[int], units: Sequence[Unit]) -> list[int]:
    """A part's samples, ascending."""
    return sorted(index for unit in part for index in units[unit])


def anything_fits(part: Sequence[int]) -> bool:
    """The `Fits` of parts without a limit."""
    return True


def heaviest_first(weights: Sequence[float]) -> list[int]:
    """Units by falling weight; among equals the first one first."""
    return sorted(range(len(weights)), key=lambda unit: (-weights[unit], unit))


def longest_first(
    units: Sequence[int], weights: Sequence[float], num_parts: int, fits: Fits = anything_fits
) -> list[list[int]] | None:
    """Deal units out in this order, each to the lightest part that it fits into; None if one fits nowhere."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    lightest = [(0.0, 0, part) for part in range(num_parts)]
    for unit in units:
        too_full = []
        while lightest:
            load, size, index = heappop(lightest)
            if fits([*parts[index], unit]):
                break
            too_full.append((load, size, index))
        else:
            return None
        parts[index].append(unit)
        heappush(lightest, (load + weights[unit], size + 1, index))
        for entry in too_full:
            heappush(lightest, entry)
    return parts


def improve(parts: list[list[int]], weights: Sequence[float], fits: Fits = anything_fits) -> None:
    """Move or swap units out of the heaviest part, in place, while that lowers it and both parts still fit.

    Never empties a part.
    """
    if not weights:
        return
    loads = [sum(weights[unit] for unit in part) for part in parts]
    good = CLOSE_ENOUGH * max(sum(loads) / len(parts), *weights)
    for _ in range(ROUNDS_PER_PART * len(parts)):
        heavy = max(range(len(parts)), key=loads.__getitem__)
        if loads[heavy] <= good or not _lighten(heavy, parts, loads, weights, fits):
            return


def _lighten(heavy: int, parts: list[list[int]], loads: list[float], weights: Sequence[float], fits: Fits) -> bool:
    """Take the best exchange between part `heavy` and the lightest part that has any; False if none has."""
    for light in sorted(range(len(parts)), key=loads.__getitem__):
        gap = loads[heavy] - loads[light]
        if gap <= 0:
            return False
        for out, back in _exchanges(parts[heavy], parts[light], weights, gap):
            kept = [unit for unit in parts[heavy] if unit != out]
            grown = [unit for unit in parts[light] if unit != back] + [out]
            if back is not None:
                kept.append(back)
            if fits(grown) and fits(kept):
                parts[heavy], parts[light] = kept, grown
                shift = weights[out] - (0.0 if back is None else weights[back])
                loads[heavy] -= shift
                loads[light] += shift
                return True
    return False


def _exchanges(
    heavy: Sequence[int], light: Sequence[int], weights: Sequence[float], gap: float
) -> Iterator[tuple[int, int | None]]:
    """Exchanges (unit that leaves `heavy`, unit that comes back or None) that bring two parts closer.

    Best first; the best shifts half the gap. For each unit that leaves, only the two partners nearest
    to that are offered.
    """
    partners: list[int | None] = [None, *sorted(light, key=lambda unit: (weights[unit], unit))]
    partner_weights = [0.0 if unit is None else weights[unit] for unit in partners]
    found = []
    for out in heavy:
        above = bisect(partner_weights, weights[out] - gap / 2)
        for place in (above - 1, above):
            if 0 <= place < len(partners):
                shift = weights[out] - partner_weights[place]
                if 0 < shift < gap:
                    found.append((abs(shift - gap / 2), out, place))
    found.sort()
    return ((out, partners[place]) for _, out, place in found)
