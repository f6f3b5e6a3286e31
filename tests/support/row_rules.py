"""Ways in which engines count the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


ROW_RULES: dict[str, Callable[[Sequence[int]], int]] = {
    "packed": sum,
    # Each sequence padded to 2 * cp, half of the rows on each of cp = 2 ranks.
    "context_parallel": lambda lengths: sum(_up(length, 4) for length in lengths) // 2,
    # The whole micro-batch padded to tp = 8.
    "sequence_parallel": lambda lengths: _up(sum(lengths), 8),
    # Not packed at all. Two together may take more rows than both apart: beyond what the planner asks for.
    "padded": lambda lengths: len(lengths) * max(lengths, default=0),
}
