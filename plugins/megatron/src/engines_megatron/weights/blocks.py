"""Flat ranges of a row-major matrix or vector, as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A block whose elements follow one another in memory."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    """Flat position of its first element."""

    @property
    def end(self) -> int:
        """Flat position behind its last element."""
        size = 1
        for extent in self.shape:
            size *= extent
        return self.begin + size


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Blocks of a tensor of `shape` (one or two dimensions) that make up its elements `start` to `stop`, in order.

    At most three: the rest of a row, whole rows, the beginning of a row.
    """
    if len(shape) == 1:
        if start < stop:
            yield Rectangle((start,), (stop - start,), start)
        return
    _, width = shape
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        if rows:
            yield Rectangle((row, 0), (rows, width), start)
            start += rows * width
        else:
            columns = min(width - column, stop - start)
            yield Rectangle((row, column), (1, columns), start)
            start += columns
