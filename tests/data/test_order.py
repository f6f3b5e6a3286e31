"""Which samples a step takes follows from the step alone."""

from __future__ import annotations

from collections import Counter

from engines.recipes.data import SampleOrder


def test_in_file_order_steps_run_on_over_epochs() -> None:
    order = SampleOrder(5, shuffle=False, seed=0)
    assert [order.step(k, 3) for k in (1, 2, 3, 4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert order.step(1, 12) == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_shuffled_epochs_hold_each_sample_once_in_orders_of_their_own() -> None:
    order = SampleOrder(101, shuffle=True, seed=3)
    stream = [index for k in range(1, 102) for index in order.step(k, 7)]
    epochs = [stream[start : start + 101] for start in range(0, 707, 101)]
    assert all(Counter(epoch) == Counter(range(101)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7
    assert SampleOrder(101, shuffle=True, seed=4).step(1, 101) != epochs[0]


def test_the_order_needs_no_past_and_never_changes() -> None:
    """The numbers are pinned: a run resumed under another version of numpy must go on with the same samples."""
    order = SampleOrder(10, shuffle=True, seed=0)
    assert order.step(3, 4) == SampleOrder(10, shuffle=True, seed=0).step(3, 4)
    assert order.step(1, 10) == [3, 7, 6, 4, 1, 0, 2, 8, 5, 9]
    assert order.step(3, 4) == [5, 9, 9, 4]
