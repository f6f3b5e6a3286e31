"""The plan of a rank's micro-batches: within the rules and the user's limit, few, and alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from engines.errors import BatchError
from engines.microbatch.budget import Budget
from engines.microbatch.packing import fewest_parts
from engines.microbatch.partition import (
    Unit,
    heaviest_first,
    improve,
    longest_first,
    samples_of,
    units_of,
    weights_of,
    work,
)

if TYPE_CHECKING:
    from engines.contract import MicroBatchRules

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which samples of a rank's share form which micro-batch; made by `plan_micro_batches`."""

    parts: tuple[tuple[int, ...], ...]
    """Indices of samples per micro-batch, ascending, each in exactly one. Fillers are empty, and last."""

    @property
    def num_fillers(self) -> int:
        """How many micro-batches hold no sample: the batch's filler token runs in their place."""
        return sum(not part for part in self.parts)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation that restores the samples' order, fillers left out.

        `[concatenated[place] for place in plan.order]` is in the order of the share, if `concatenated` holds
        one item per sample, micro-batch after micro-batch.
        """
        samples = [index for part in self.parts for index in part]
        return tuple(sorted(range(len(samples)), key=samples.__getitem__))

    def restore(self, results: Sequence[Sequence[T]]) -> list[T]:
        """Per-sample results of the micro-batches, in the order of the share.

        `results`: one sequence per micro-batch, with one item per sample; what a filler returned is dropped.
        """
        assert len(results) == len(self.parts), f"{len(results)} results of {len(self.parts)} micro-batches"
        concatenated: list[T] = []
        for part, items in zip(self.parts, results, strict=True):
            assert not part or len(items) == len(part), f"{len(items)} items for {len(part)} samples"
            concatenated.extend(items)  # those of fillers come last, where no place points to
        return [concatenated[place] for place in self.order]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    rules: MicroBatchRules,
    samples_per_micro_batch: int | None = None,
    max_rows: int | None = None,
    count: int | None = None,
    groups: Sequence[int | str] | None = None,
) -> MicroBatchPlan:
    """Cut a rank's share of a mini-batch into micro-batches that the engine's schedule accepts.

    `lengths`: tokens of each sample of the share; may be empty. `rules`: the engine's, for the pass to come.
    `groups`: one label per sample; samples with equal labels share a micro-batch. At most one limit is given:

    * `max_rows`: `rules.rows` of a micro-batch's lengths never exceeds it. As few micro-batches as `packing`
      finds, balanced by work, heaviest first: data-parallel ranks, which wait for each other at each
      micro-batch, meet alike ones, and too little memory shows at once.
    * `samples_per_micro_batch`: consecutive chunks of so many samples in the order of the share, the last one
      smaller, as a plain `split` makes them. Groups stand where their first sample stands; a chunk ends
      before the group that would exceed it.
    * neither: one micro-batch.

    Where the rules or `count` ask for more micro-batches than that, the samples are spread over more of them,
    and only where samples run out do fillers (empty parts) make up the number. `count`: the number agreed
    among data-parallel ranks (`agreed_count` of what each rank's plan has without it).

    Every rank of a replica calls this before a pass with the same arguments and gets the same plan. Raises
    `BatchError` if a sample (or group) exceeds the limit alone.
    """
    assert samples_per_micro_batch is None or max_rows is None, "the config refuses two limits"
    units = units_of(len(lengths), groups)
    if samples_per_micro_batch is not None:
        weights = weights_of(units, [work(length) for length in lengths])
        parts = _consecutive(units, samples_per_micro_batch)
        count = _final_count(len(parts), rules, count)
        _cut_until(min(count, len(units)), parts, weights)
    else:
        budget = Budget(lengths, units, rules.rows, max_rows)
        weights = _costs(budget, lengths, units, rules)
        parts = fewest_parts(weights, budget.unit_rows, budget.fits, budget.fewest_possible())
        count = _final_count(len(parts), rules, count)
        parts = _spread(min(count, len(units)), parts, weights, budget)
    samples = [tuple(samples_of(part, units)) for part in parts]
    return MicroBatchPlan((*samples, *[()] * (count - len(samples))))


def agreed_count(local_counts: Sequence[int], rules: MicroBatchRules) -> int:
    """Micro-batches that all data-parallel ranks run: the most that any needs, rounded up by the rules."""
    count = max([rules.at_least, *local_counts])
    return -(-count // rules.multiple_of) * rules.multiple_of


def _final_count(needed: int, rules: MicroBatchRules, agreed: int | None) -> int:
    own = agreed_count([needed], rules)
    if agreed is None:
        return own
    assert agreed >= own, f"ranks agreed on {agreed} micro-batches, this one needs {own}"
    assert agreed == agreed_count([agreed], rules), f"ranks agreed on {agreed} micro-batches, against {rules}"
    return agreed


def _consecutive(units: Sequence[Unit], limit: int) -> list[list[int]]:
    """Units in their order, a new part wherever the next one would exceed `limit` samples."""
    assert limit > 0, f"{limit} samples per micro-batch"
    parts: list[list[int]] = []
    room = 0
    for index, unit in enumerate(units):
        if len(unit) > limit:
            samples = ", ".join(map(str, unit))
            raise BatchError(
                f"samples {samples} must stay together, but a micro-batch holds at most {limit}",
                f"raise micro_batch_size to at least {len(unit)}, or set max_tokens_per_micro_batch instead",
            )
        if len(unit) > room:
            parts.append([])
            room = limit
        parts[-1].append(index)
        room -= len(unit)
    return parts


def _costs(budget: Budget, lengths: Sequence[int], units: Sequence[Unit], rules: MicroBatchRules) -> list[float]:
    """What balancing makes alike: work, but rows where all micro-batches are padded to the fullest one."""
    if rules.equal_rows:
        return [float(rows) for rows in budget.unit_rows]
    return weights_of(units, [work(length) for length in lengths])


def _spread(count: int, packed: list[list[int]], weights: Sequence[float], budget: Budget) -> list[list[int]]:
    """`count` parts of nearly equal weight, heaviest first; made from those in `packed` if need be."""
    parts = packed
    if count > len(packed):
        parts = longest_first(heaviest_first(weights), weights, count, budget.fits) or packed
        _cut_until(count, parts, weights)
    improve(parts, weights, budget.fits)
    return sorted(parts, key=lambda part: -sum(weights[unit] for unit in part))


def _cut_until(count: int, parts: list[list[int]], weights: Sequence[float]) -> None:
    """Cut the heaviest divisible part, in place, where its halves are most alike, until there are `count`."""

    def weight(part: Sequence[int]) -> float:
        return sum(weights[unit] for unit in part)

    while len(parts) < count:
        heaviest = max(
            (place for place, part in enumerate(parts) if len(part) > 1),
            key=lambda place: weight(parts[place]),
        )
        part = parts[heaviest]
        cut = min(range(1, len(part)), key=lambda cut: abs(weight(part[:cut]) - weight(part[cut:])))
        parts[heaviest : heaviest + 1] = [part[:cut], part[cut:]]
