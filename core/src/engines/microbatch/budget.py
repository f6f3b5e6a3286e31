"""The limit on a micro-batch's rows, as the engine counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.errors import BatchError
from engines.microbatch.packing import pigeonhole_bound
from engines.microbatch.partition import Unit


class Budget:
    """At most `max_rows` rows a micro-batch (None: no limit), for the units of one rank's share.

    `rows(lengths)` is `MicroBatchRules.rows`. Asked of it: more or longer sequences never take fewer rows,
    and two micro-batches put together never take more than both apart. Were that untrue, there could be more
    micro-batches than needed; the limit would hold all the same.
    Raises `BatchError` if a unit exceeds the limit alone.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        units: Sequence[Unit],
        rows: Callable[[Sequence[int]], int],
        max_rows: int | None,
    ) -> None:
        assert max_rows is None or max_rows > 0, f"{max_rows} rows per micro-batch"
        self._rows = rows
        self._max_rows = max_rows
        self._lengths = [[lengths[index] for index in unit] for unit in units]
        self.unit_rows = [rows(unit_lengths) for unit_lengths in self._lengths]
        for unit, unit_rows in zip(units, self.unit_rows, strict=True):
            if max_rows is not None and unit_rows > max_rows:
                raise _too_long(unit, [lengths[index] for index in unit], unit_rows, max_rows)

    def fits(self, part: Sequence[int]) -> bool:
        """Whether these units may share a micro-batch."""
        if self._max_rows is None:
            return True
        return self._rows([length for unit in part for length in self._lengths[unit]]) <= self._max_rows

    def fewest_possible(self) -> int:
        """A lower bound of the number of micro-batches: by all rows, and by how few fit together."""
        if self._max_rows is None or not self._lengths:
            return min(1, len(self._lengths))
        all_rows = self._rows([length for lengths in self._lengths for length in lengths])
        bound = max(1, -(-all_rows // self._max_rows))
        if all(len(lengths) == 1 for lengths in self._lengths):
            # Groups have no order in which `fits` is surely monotone; nor have samples that are equal in rows.
            bound = pigeonhole_bound([length for (length,) in self._lengths], self.fits, bound)
        return bound


def _too_long(unit: Unit, lengths: Sequence[int], rows: int, max_rows: int) -> BatchError:
    if len(unit) == 1:
        what = f"sample {unit[0]} of this rank's share ({lengths[0]} tokens) takes {rows} rows"
    else:
        samples, tokens = ", ".join(map(str, unit)), " + ".join(map(str, lengths))
        what = f"samples {samples} ({tokens} tokens) must stay together and take {rows} rows"
    return BatchError(
        f"{what}, but a micro-batch holds at most {max_rows}",
        f"raise max_tokens_per_micro_batch to at least {rows}, or shorten the data (data.max_length)",
    )
