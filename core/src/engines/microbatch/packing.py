"""The fewest parts that a budget allows: bin packing with a caller's own measure of a part.

The measure is a predicate on units, because only the engine knows how many rows a set of sequences takes
(context parallelism pads each of them). Bin packing is NP-hard: best-fit decreasing gives an upper bound
(asymptotically 11/9 of the optimum, Johnson 1974), sizes give a lower one, and in between one looks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from engines.microbatch.partition import Fits, heaviest_first, longest_first

SEARCH_STEPS = 20_000
"""Questions to `fits` that the search asks for one number of parts before it gives up: a number, not a time,
so that it ends at the same place on every machine."""


def fewest_parts(weights: Sequence[float], sizes: Sequence[int], fits: Fits, at_least: int) -> list[list[int]]:
    """Pack units into as few parts as found, of similar weight where possible; each unit must fit alone.

    `sizes`: one per unit, for the order in which parts are tried. `at_least`: a lower bound of the number of
    parts. The number is minimal if it equals that bound, or if the search for fewer came to its end; it is
    never more than best-fit decreasing needs.
    """
    by_weight = heaviest_first(weights)
    packed = _best_fit(heaviest_first(sizes), sizes, fits)
    for count in range(at_least, len(packed)):
        parts = longest_first(by_weight, weights, count, fits) or _search(count, sizes, fits)
        if parts is not None:
            return parts
    return longest_first(by_weight, weights, len(packed), fits) or packed


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


def _best_fit(units: Sequence[int], sizes: Sequence[int], fits: Fits) -> list[list[int]]:
    """Put each unit, in this order, into the fullest part that has room for it, or else into a new one.

    Parts are bisected by the sum of their sizes: exact where `fits` depends on that sum, else a good guess.
    """
    parts: list[list[int]] = []
    by_fullness: list[tuple[int, int]] = []
    for unit in units:
        too_full = bisect_left(by_fullness, True, key=lambda entry: not fits([*parts[entry[1]], unit]))
        if too_full > 0:
            fullness, place = by_fullness.pop(too_full - 1)
        else:
            fullness, place = 0, len(parts)
            parts.append([])
        parts[place].append(unit)
        insort(by_fullness, (fullness + sizes[unit], place))
    return parts


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
