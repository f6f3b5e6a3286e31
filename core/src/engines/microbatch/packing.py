"""The fewest parts that a budget allows: bin packing with a caller's own measure of a part.

The measure is a predicate on units, because only the engine knows how many rows a set of sequences takes
(context parallelism pads each of them). Bin packing is NP-hard: best-fit decreasing gives an upper bound
(asymptotically 11/9 of the optimum, Johnson 1974), sizes give a lower one, and in between one looks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from engines.microbatch.partition import Fits, heaviest_first, longest_first

SHARES_BY_WEIGHT = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.0)
"""Shares of the units, heaviest first, that `deal` places by weight before it fills holes with the others."""

SEARCH_STEPS = 20_000
"""Questions to `fits` that the search asks for one number of parts before it gives up: a number, not a time,
so that it ends at the same place on every machine."""


def fewest_parts(
    weights: Sequence[float], sizes: Sequence[int], fits: Fits, at_least: int
) -> list[list[int]]:
    """Pack units into as few parts as found, of similar weight where possible; each unit must fit alone.

    `sizes`: one per unit, for the order in which parts are tried. `at_least`: a lower bound of the number of
    parts. The number is minimal if it equals that bound, or if the search for fewer came to its end; it is
    never more than best-fit decreasing needs.
    """
    upper_bound: list[list[int]] = []
    _best_fit(heaviest_first(sizes), upper_bound, sizes, fits, open_parts=True)
    for count in range(at_least, len(upper_bound)):
        parts = deal(count, weights, sizes, fits) or _search(count, sizes, fits)
        if parts is not None:
            return parts
    return deal(len(upper_bound), weights, sizes, fits) or upper_bound


def deal(count: int, weights: Sequence[float], sizes: Sequence[int], fits: Fits) -> list[list[int]] | None:
    """Deal units out to at most `count` parts, by weight as far as they fit so; None if it doesn't work.

    Longest first alone leaves no part with a hole large enough for the last units where budgets are tight; so
    ever more of the light units are instead put where they fit best.
    """
    order = heaviest_first(weights)
    for share in SHARES_BY_WEIGHT:
        by_weight = round(share * len(order))
        parts = longest_first(order[:by_weight], weights, count, fits)
        if parts is not None and _best_fit(order[by_weight:], parts, sizes, fits, open_parts=False):
            return [part for part in parts if part]
    return None


def pigeonhole_bound(sizes: Sequence[int], fits: Fits, at_least: int = 1) -> int:
    """A lower bound of the number of parts, where `fits` is monotone in the sizes of a part's units too.

    If the m + 1 smallest of the j largest units don't fit together, no part holds more than m of those j:
    there are at least ceil(j / m) parts. For each m that can beat `at_least`, another such bound, the largest
    such j is found by bisection.
    """
    order = heaviest_first(sizes)
    bound = at_least
    for most in range(1, len(order)):
        if -(-len(order) // most) <= bound:
            break
        too_many = range(most + 1, len(order) + 1)
        crowded = most + bisect_left(too_many, True, key=lambda j: fits(order[j - most - 1 : j]))
        bound = max(bound, -(-crowded // most))
    return bound


def _best_fit(
    units: Sequence[int], parts: list[list[int]], sizes: Sequence[int], fits: Fits, *, open_parts: bool
) -> bool:
    """Put each unit into the fullest part that has room, in place; False if there is none.

    With `open_parts` there always is, a new one. Parts are bisected by the sum of their sizes: exact where
    `fits` depends on that sum, else a good guess.
    """
    by_fullness = sorted((sum(sizes[unit] for unit in part), place) for place, part in enumerate(parts))
    for unit in units:
        too_full = bisect_left(by_fullness, True, key=lambda entry: not fits([*parts[entry[1]], unit]))
        if too_full > 0:
            fullness, place = by_fullness.pop(too_full - 1)
        elif open_parts:
            fullness, place = 0, len(parts)
            parts.append([])
        else:
            return False
        parts[place].append(unit)
        insort(by_fullness, (fullness + sizes[unit], place))
    return True


def _search(count: int, sizes: Sequence[int], fits: Fits) -> list[list[int]] | None:
    """A packing into at most `count` parts, depth first; None if there is none, or none found in time.

    The stack is explicit, as units may outnumber Python's frames: `open_places[d]` holds what is still to be
    tried for unit `order[d]`, `taken[d]` the part that it is in.
    """
    order = heaviest_first(sizes)
    if len(order) * count > SEARCH_STEPS:
        return None  # not even one descent is sure to reach the ground
    parts: list[list[int]] = []
    steps_left = SEARCH_STEPS

    def places(unit: int) -> Iterator[int]:
        nonlocal steps_left
        fullness = [sum(sizes[other] for other in part) for part in parts]
        for place in sorted(range(len(parts)), key=lambda place: -fullness[place]):
            steps_left -= 1
            if fits([*parts[place], unit]):
                yield place
        if len(parts) < count:
            yield len(parts)

    open_places = [places(order[0])]
    taken: list[int] = []
    while open_places and steps_left > 0:
        place = next(open_places[-1], None)
        if place is not None:
            if place == len(parts):
                parts.append([])
            parts[place].append(order[len(taken)])
            taken.append(place)
            if len(taken) == len(order):
                return parts
            open_places.append(places(order[len(taken)]))
        else:
            open_places.pop()
            if taken:
                emptied = taken.pop()
                parts[emptied].pop()
                if not parts[emptied]:
                    parts.pop()
    return None
