"""Modes nest and are restored; closing works at any point of an engine's life, and once."""

from __future__ import annotations

import pytest

from engines import create
from engines.losses import SFTLoss
from support.bigram import MODEL, BigramEngine, registered, sequences


class Failing(BigramEngine):
    """Its `initialize` fails half-way; `calls` shows whether it was closed."""

    made: Failing

    def __init__(self, ctx):
        super().__init__(ctx)
        Failing.made = self

    def initialize(self):
        super().initialize()
        raise OSError("no such weights")


class Able(BigramEngine):
    """Has adapters and moves, as far as `calls` tells."""

    def set_adapter_enabled(self, enabled):
        self.calls.append("adapter on" if enabled else "adapter off")

    def move(self, device, parts):
        self.calls.append(f"{' and '.join(sorted(parts))} to {device}")


@pytest.fixture
def able():
    with registered(Able, capabilities=["lora", "offload"]):
        made = create(MODEL, {"strategy": "bigram"})
    made.initialize()
    calls(made)
    return made


@pytest.fixture
def engine():
    with registered():
        made = create(MODEL, {"strategy": "bigram"}, {"lr": 0.1})
    made.initialize()
    return made


def calls(engine) -> list[str]:
    """The hooks that ran since the last look."""
    ran, engine._base.calls = engine._base.calls, []
    return ran


def test_it_starts_in_eval_mode(engine):
    assert calls(engine) == ["initialize", "eval"]


def test_modes_nest(engine):
    calls(engine)
    with engine.train_mode():
        with engine.eval_mode():
            with engine.train_mode():
                assert calls(engine) == ["train", "eval", "train"]
            assert calls(engine) == ["eval"]
        assert calls(engine) == ["train"]
    assert calls(engine) == ["eval"]


def test_an_inner_context_does_not_end_the_outer_one(engine):
    with engine.train_mode():
        with engine.train_mode():
            pass
        assert engine._base._model.training
    assert not engine._base._model.training


def test_modes_are_restored_after_exceptions(engine):
    with pytest.raises(KeyError), engine.train_mode(), engine.eval_mode():
        raise KeyError
    assert not engine._base._model.training
    with engine.train_mode():
        with pytest.raises(KeyError), engine.eval_mode():
            raise KeyError
        assert engine._base._model.training


def test_batches_bring_their_own_mode(engine):
    calls(engine)
    engine.train_batch(sequences(3), SFTLoss())
    assert calls(engine) == ["train", "forward", "step", "eval"]
    with engine.train_mode():
        calls(engine)
        engine.infer_batch(sequences(3))
        assert calls(engine) == ["eval", "forward", "train"]


def test_a_failing_batch_restores_the_mode(engine):
    with engine.train_mode():
        calls(engine)
        with pytest.raises(IndexError):
            engine.infer_batch(sequences(3).with_tokens(input_ids=sequences(3)["input_ids"] + 99))
        assert calls(engine) == ["eval", "forward", "train"]


def test_adapters_are_off_inside_and_on_again_whatever_happens(able):
    with able.disable_adapter():
        with able.disable_adapter():
            pass
        assert calls(able) == ["adapter off"], "an inner context does not end the outer one"
    with pytest.raises(KeyError), able.disable_adapter():
        raise KeyError
    assert calls(able) == ["adapter on", "adapter off", "adapter on"]


def test_parts_are_moved_by_name(able):
    able.to("cpu", model=False)
    able.to("cpu", optimizer=False, grad=False)
    assert calls(able) == ["grads and optimizer to cpu", "model to cpu"]


def test_close_twice(engine):
    calls(engine)
    base = engine._base
    engine.close()
    engine.close()
    assert base.calls == ["close"]


def test_close_after_a_failed_initialize():
    with registered(Failing):
        engine = create(MODEL, {"strategy": "bigram"})
    with pytest.raises(OSError, match="no such weights"), engine:
        engine.initialize()
    assert Failing.made.calls == ["initialize", "close"]


def test_close_without_initialize():
    with registered():
        create(MODEL, {"strategy": "bigram"}).close()


def test_a_closed_engine_says_so(engine):
    engine.close()
    with pytest.raises(AssertionError, match="closed"):
        engine.train_batch(sequences(3), SFTLoss())


def test_ranks_answer_before_initialize():
    with registered():
        engine = create(MODEL, {"strategy": "bigram"})
    assert engine.get_data_parallel_rank() == 0 and engine.get_data_parallel_size() == 1
    assert engine.is_mp_src_rank_with_outputs() and engine.get_data_parallel_group() is None
