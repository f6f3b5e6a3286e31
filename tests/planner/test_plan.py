"""Micro-batch plans: the budget, the rules, groups, fillers, and the way back to the samples' order."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.contract import MicroBatchRules
from engines.errors import BatchError
from engines.microbatch import MicroBatchPlan, agreed_count, plan_micro_batches, work
from support.row_rules import ROW_RULES

FREE = MicroBatchRules()
FOUR_STAGES = MicroBatchRules(at_least=4)
INTERLEAVED = MicroBatchRules(at_least=4, multiple_of=4)


def test_without_a_limit_the_share_is_one_micro_batch() -> None:
    assert plan_micro_batches([7, 900, 3], rules=FREE).parts == ((0, 1, 2),)


def test_without_a_limit_a_schedule_may_want_more() -> None:
    # Four parts of 6 samples, heaviest first: 9, 8, 7 (4 + 3), 7 (5 + 2), where 25 + 4 outweighs 16 + 9.
    plan = plan_micro_batches([5, 8, 4, 3, 2, 9], rules=FOUR_STAGES)
    assert plan.parts == ((5,), (1,), (0, 4), (2, 3))


def test_a_budget_by_hand() -> None:
    # 24 tokens need three micro-batches of 10: 9, 8 and 7 tokens.
    plan = plan_micro_batches([6, 4, 3, 9, 2], rules=FREE, max_rows=10)
    assert plan.parts == ((3,), (0, 4), (1, 2))


def test_a_budget_counts_rows_not_tokens() -> None:
    # Two context-parallel ranks pad 5 to 8: two samples are 16 tokens, 8 rows on each rank.
    padded = ROW_RULES["context_parallel"]
    assert len(plan_micro_batches([5, 5, 5, 5], rules=MicroBatchRules(rows=padded), max_rows=8).parts) == 2
    assert len(plan_micro_batches([5, 5, 5, 5], rules=MicroBatchRules(rows=padded), max_rows=7).parts) == 4


def test_micro_batches_within_a_budget_are_balanced_by_work() -> None:
    # Both have room for the 100; in work 3000 is 5197, 2000 + 1000 only 4221.
    plan = plan_micro_batches([3000, 2000, 100, 1000], rules=FREE, max_rows=4000)
    assert plan.parts == ((0,), (1, 2, 3))


def test_equal_rows_are_balanced_by_rows() -> None:
    # Work puts both 400 with 2000 + 1000, whose attention costs less: 3800 rows, and 3000 padded to them.
    lengths = [3000, 2000, 1000, 400, 400]
    by_work = plan_micro_batches(lengths, rules=FREE, max_rows=4000)
    by_rows = plan_micro_batches(lengths, rules=MicroBatchRules(equal_rows=True), max_rows=4000)
    fullest = [max(sum(lengths[i] for i in part) for part in plan.parts) for plan in (by_work, by_rows)]
    assert fullest == [3800, 3400]


def test_balancing_improves_on_longest_first_and_keeps_the_budget() -> None:
    # As in test_balance, 7 + 6 against 5 + 4 + 4.
    assert plan_micro_batches([7, 6, 5, 4, 4], rules=FREE, max_rows=15).parts == ((0, 1), (2, 3, 4))
    # 3500 rows twice, all taken: the 3000 and 5 x 100 have more work, but nothing can leave them.
    plan = plan_micro_batches([3000, *[100] * 40], rules=FREE, max_rows=3500)
    assert [len(part) for part in plan.parts] == [6, 35]


def test_parts_are_cut_where_dealing_out_to_more_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.microbatch.plan.longest_first", lambda *_: None)
    plan = plan_micro_batches([12, 9, 5, 5, 4, 4, 1], rules=MicroBatchRules(at_least=4), max_rows=20)
    assert sorted(len(part) for part in plan.parts) == [1, 1, 2, 3]


def test_fixed_size_takes_consecutive_samples() -> None:
    assert plan_micro_batches([1] * 5, rules=FREE, samples_per_micro_batch=2).parts == ((0, 1), (2, 3), (4,))
    assert plan_micro_batches([1, 9], rules=FREE, samples_per_micro_batch=1).parts == ((0,), (1,))


def test_fixed_size_is_cut_further_where_the_schedule_wants_more() -> None:
    plan = plan_micro_batches([1] * 8, rules=FOUR_STAGES, samples_per_micro_batch=4)
    assert plan.parts == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_fixed_size_keeps_groups() -> None:
    # The pairs (0, 3), (1, 4), (2, 5) and a single 6.
    plan = plan_micro_batches([1] * 7, rules=FREE, samples_per_micro_batch=4, groups=list("abcabcd"))
    assert plan.parts == ((0, 1, 3, 4), (2, 5, 6))


def test_fewer_samples_than_stages_are_filled_up() -> None:
    plan = plan_micro_batches([8, 5], rules=FOUR_STAGES, max_rows=100)
    assert plan.parts == ((0,), (1,), (), ())
    assert plan.num_fillers == 2


def test_the_count_is_rounded_up_to_a_multiple() -> None:
    plan = plan_micro_batches([10] * 5, rules=INTERLEAVED, max_rows=10)
    assert [len(part) for part in plan.parts] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_an_agreed_count_spreads_samples_before_it_fills() -> None:
    plan = plan_micro_batches([4, 4, 4, 4], rules=FREE, max_rows=8, count=3)
    assert (len(plan.parts), plan.num_fillers) == (3, 0)
    plan = plan_micro_batches([4, 4, 4, 4], rules=FREE, max_rows=8, count=6)
    assert (len(plan.parts), plan.num_fillers) == (6, 2)
    plan = plan_micro_batches([4, 4, 4, 4], rules=FREE, samples_per_micro_batch=4, count=2)
    assert plan.parts == ((0, 1), (2, 3))


def test_an_agreed_count_cuts_no_group() -> None:
    plan = plan_micro_batches([4, 4, 4, 4], rules=FREE, count=3, groups=[1, 1, 1, 2])
    assert plan.parts == ((0, 1, 2), (3,), ())


@pytest.mark.parametrize("count", [2, 5])
def test_an_agreed_count_that_cannot_be_is_a_defect(count: int) -> None:
    with pytest.raises(AssertionError, match=f"ranks agreed on {count} micro-batches"):
        plan_micro_batches([10] * 4, rules=MicroBatchRules(multiple_of=2), max_rows=10, count=count)


@pytest.mark.parametrize(("rules", "count"), [(FREE, 1), (FOUR_STAGES, 4), (MicroBatchRules(multiple_of=3), 3)])
@pytest.mark.parametrize("limit", [{}, {"max_rows": 10}, {"samples_per_micro_batch": 2}])
def test_a_rank_without_samples_runs_fillers(rules: MicroBatchRules, count: int, limit: dict[str, int]) -> None:
    assert plan_micro_batches([], rules=rules, **limit).parts == ((),) * count


def test_counts_are_agreed_by_their_maximum_and_the_rules() -> None:
    assert agreed_count([2, 7, 1], FREE) == 7
    assert agreed_count([2, 1], FOUR_STAGES) == 4
    assert agreed_count([5, 1], INTERLEAVED) == 8
    assert agreed_count([0], FREE) == 1


def test_a_sample_beyond_the_budget_is_named() -> None:
    rules = MicroBatchRules(rows=ROW_RULES["context_parallel"])
    with pytest.raises(BatchError) as error:
        plan_micro_batches([3, 21, 5], rules=rules, max_rows=10)
    for part in (
        "sample 1",
        "21 tokens",
        "12 rows",
        "at most 10",
        "max_tokens_per_micro_batch to at least 12",
    ):
        assert part in str(error.value)


def test_a_group_beyond_the_budget_is_named() -> None:
    with pytest.raises(BatchError, match=r"samples 0, 2 \(6 \+ 5 tokens\) must stay together and take 11 rows"):
        plan_micro_batches([6, 4, 5], rules=FREE, max_rows=10, groups=["x", "y", "x"])
    with pytest.raises(
        BatchError, match=r"samples 0, 2 must stay together.*at most 1\n.*micro_batch_size to at least 2"
    ):
        plan_micro_batches([6, 4, 5], rules=FREE, samples_per_micro_batch=1, groups=["x", "y", "x"])


def test_results_come_back_in_the_samples_order() -> None:
    plan = MicroBatchPlan(((1, 4), (0,), (2, 3), ()))
    assert plan.restore(["be", "a", "cd", "filler"]) == list("abcde")
    assert "".join("beacd"[place] for place in plan.order) == "abcde"


def test_results_of_another_number_are_a_defect() -> None:
    plan = MicroBatchPlan(((1,), (0,)))
    with pytest.raises(AssertionError, match="1 results of 2 micro-batches"):
        plan.restore(["a"])
    with pytest.raises(AssertionError, match="2 items for 1 samples"):
        plan.restore(["ab", "c"])


LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 400)), max_size=48)
RULES = st.builds(
    MicroBatchRules,
    at_least=st.integers(1, 5),
    multiple_of=st.integers(1, 4),
    equal_rows=st.booleans(),
    rows=st.sampled_from(list(ROW_RULES.values())),
)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, RULES, st.data())
def test_every_plan_keeps_every_promise(lengths: list[int], rules: MicroBatchRules, data: st.DataObject) -> None:
    labels = data.draw(st.none() | st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    members: dict[int, list[int]] = {}
    for index in range(len(lengths)):
        members.setdefault(index if labels is None else labels[index], []).append(index)
    widest = max((rules.rows([lengths[i] for i in group]) for group in members.values()), default=1)
    limit = data.draw(st.sampled_from(["max_rows", "samples_per_micro_batch", None]))
    limits: dict[str, int] = {}
    if limit == "max_rows":
        limits = {"max_rows": widest + data.draw(st.integers(0, 300))}
    elif limit is not None:
        limits = {limit: max(map(len, members.values()), default=1) + data.draw(st.integers(0, 6))}

    local = len(plan_micro_batches(lengths, rules=rules, groups=labels, **limits).parts)
    count = agreed_count([local, local + data.draw(st.integers(0, 9))], rules)
    plan = plan_micro_batches(lengths, rules=rules, groups=labels, count=count, **limits)

    assert len(plan.parts) == count >= rules.at_least
    assert count % rules.multiple_of == 0
    assert sorted(index for part in plan.parts for index in part) == list(range(len(lengths)))
    assert plan.num_fillers == max(0, count - len(members)), "fillers only where samples run out"
    assert all(plan.parts[: count - plan.num_fillers]), "fillers come last"
    for part in plan.parts:
        assert list(part) == sorted(part)
        assert "max_rows" not in limits or rules.rows([lengths[i] for i in part]) <= limits["max_rows"]
        assert len(part) <= limits.get("samples_per_micro_batch", len(lengths))
    for group in members.values():
        assert sum(bool(set(group) & set(part)) for part in plan.parts) == 1
    assert plan.restore([[lengths[i] for i in part] for part in plan.parts]) == lengths
    assert plan == plan_micro_batches(list(lengths), rules=rules, groups=labels, count=count, **limits)
    if limit != "samples_per_micro_batch" and not rules.equal_rows:
        costs = [sum(work(lengths[i]) for i in part) for part in plan.parts]
        assert costs == sorted(costs, reverse=True), "heaviest first"


def test_planning_imports_no_torch() -> None:
    code = "import sys, engines.microbatch; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
