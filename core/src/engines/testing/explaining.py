"""What numbers that are wrong look like: a cause in words, where they show one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

ALIKE = 1e-3
"""Relative difference below which a ratio is a whole number's; far above rounding, far below chance."""


def scaled(found: Sequence[float], expected: Sequence[float], ranks: int) -> str:
    """Whether each number is a multiple, or a fraction, of what it should be, by as many ranks as may have been
    counted alike: some of them, or all. A sentence, or nothing.
    """
    for n in (n for n in range(ranks, 1, -1) if ranks % n == 0):
        some = f"all {n}" if n == ranks else f"{n} of {ranks}"
        if _all_near(found, expected, 1 / n):
            return f"; each is 1/{n} of what it should be, as if {some} ranks were averaged instead of summed"
        if _all_near(found, expected, n):
            return f"; each is {n} times what it should be, as if {some} ranks counted the same samples"
    return ""


def _all_near(found: Sequence[float], expected: Sequence[float], factor: float) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(abs(one - factor * other) <= ALIKE * abs(factor * other) for one, other in pairs)


def moved(found: Tensor, expected: Tensor, lengths: Sequence[int], tolerance: float) -> str:
    """Whether per-token outputs are those that they should be at other places: a token too early or too late, or with
    sequences of these `lengths` in another order. A sentence, or nothing.
    """
    if found.shape != expected.shape:
        return ""

    def near(one: Tensor, other: Tensor) -> bool:
        return bool(((one - other).abs() <= tolerance * (1 + other.abs())).all())

    for by, way in ((1, "late"), (-1, "early")):
        if near(found, expected.roll(by)):
            return f"; they are the right ones, each a token too {way}"
    order = _order(found, expected.split(list(lengths)), near)
    if order is not None:
        return f"; they are the right ones in another order, that of the sequences {order}"
    if near(found.sort().values, expected.sort().values):
        return "; they are the right ones in another order"
    return ""


def _order(found: Tensor, sequences: Sequence[Tensor], near: Callable[[Tensor, Tensor], bool]) -> list[int] | None:
    """In which order the sequences stand in `found`; None if they don't."""
    order: list[int] = []
    place = 0
    while place < len(found):
        fitting = (
            index
            for index, one in enumerate(sequences)
            if index not in order and len(one) <= len(found) - place and near(found[place : place + len(one)], one)
        )
        index = next(fitting, None)
        if index is None:
            return None
        order.append(index)
        place += len(sequences[index])
    return order
