"""The fewest micro-batches: against every packing there is, and bounds worked out by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from engines.contract import MicroBatchRules
from engines.microbatch import plan_micro_batches
from engines.microbatch.packing import pigeonhole_bound
from support.row_rules import ROW_RULES


def fewest_possible(units: list[list[int]], rows: Callable[[Sequence[int]], int], limit: int) -> int:
    """The optimum, by trying every packing of `units` (lists of lengths)."""
    best = len(units)

    def place(index: int, parts: list[list[int]]) -> None:
        nonlocal best
        if len(parts) >= best:
            return
        if index == len(units):
            best = len(parts)
            return
        for part in range(len(parts)):
            if rows(parts[part] + units[index]) <= limit:
                place(index + 1, [*parts[:part], parts[part] + units[index], *parts[part + 1 :]])
        place(index + 1, [*parts, units[index]])

    place(0, [])
    return best


def num_parts(lengths: list[int], limit: int, rows: Callable[[Sequence[int]], int] = sum) -> int:
    return len(plan_micro_batches(lengths, rules=MicroBatchRules(rows=rows), max_rows=limit).parts)


@pytest.mark.parametrize("rule", ["packed", "context_parallel", "sequence_parallel", "padded"])
def test_small_cases_take_as_few_as_possible(rule: str) -> None:
    rng = random.Random(rule)
    rows = ROW_RULES[rule]
    for _ in range(60):
        lengths = [rng.randint(1, 60) for _ in range(9)]
        limit = rows([60]) + rng.randint(0, 60)
        optimum = fewest_possible([[length] for length in sorted(lengths, reverse=True)], rows, limit)
        found = num_parts(lengths, limit, rows)
        # "padded" breaks what a lower bound rests on: there, more than needed is allowed, less is impossible.
        assert found == optimum or (rule == "padded" and found > optimum), (lengths, limit)


def test_small_cases_with_groups_take_as_few_as_possible() -> None:
    rng = random.Random(11)
    for rule in ("packed", "context_parallel", "sequence_parallel"):
        rows = ROW_RULES[rule]
        for _ in range(30):
            lengths = [rng.randint(1, 30) for _ in range(14)]
            labels = [index // 2 for index in range(14)]
            units = sorted(([lengths[i], lengths[i + 1]] for i in range(0, 14, 2)), key=sum, reverse=True)
            limit = rows([30, 30]) + rng.randint(0, 40)
            plan = plan_micro_batches(lengths, rules=MicroBatchRules(rows=rows), max_rows=limit, groups=labels)
            assert len(plan.parts) == fewest_possible(units, rows, limit), (lengths, limit)


def test_searches_where_filling_greedily_fails() -> None:
    # 12 + 4 + 4 and 9 + 5 + 5 + 1. Best-fit decreasing puts the first 5 beside the 12 and needs a third.
    assert num_parts([12, 9, 5, 5, 4, 4, 1], 20) == 2


def test_packings_without_any_room_are_found() -> None:
    rng = random.Random(0)
    for _ in range(300):
        optimum = rng.randint(2, 4)
        cuts = [sorted(rng.sample(range(1, 20), rng.randint(1, 3))) for _ in range(optimum)]
        lengths = [end - start for cut in cuts for start, end in itertools.pairwise([0, *cut, 20])]
        assert num_parts(lengths, 20) == optimum, lengths


def test_a_tight_budget_of_many_samples_still_meets_the_lower_bound() -> None:
    rng = random.Random(0)
    lengths = [max(1, round(rng.lognormvariate(6.0, 1.0))) for _ in range(1024)]
    assert num_parts(lengths, 8000) == -(-sum(lengths) // 8000)


def test_large_cases_meet_a_bound() -> None:
    # Three of 34 never fit into 100: pairs, 17 of them. By tokens alone it would be ceil(1156 / 100) = 12.
    assert num_parts([34] * 34, 100) == 17


@pytest.mark.parametrize(
    ("lengths", "limit", "bound"),
    [
        ([60, 55, 51, 10, 10], 100, 3),  # no two of the three largest fit together
        ([34] * 9, 100, 5),  # no three do: pairs
        ([50, 50, 50, 40, 30, 20], 100, 3),  # 50 + 40 + 30 are too many: at most two of the five largest
        ([10, 10], 100, 1),
    ],
)
def test_pigeonhole_bound_by_hand(lengths: list[int], limit: int, bound: int) -> None:
    assert pigeonhole_bound(lengths, lambda part: sum(lengths[unit] for unit in part) <= limit) == bound
