"""Wrappers stand around one engine's hooks, see everything that passes, and are not there when not asked for."""

from __future__ import annotations

import json

import pytest
import torch

from engines import create
from engines.contract import MicroBatchRules, StepResult, hookimpl
from engines.errors import ConfigError
from engines.losses import SFTLoss
from engines.tracing import ChromeTracer
from support.bigram import MODEL, BigramEngine, registered, sequences


class Observer:
    """Notes every micro-batch forward of the engine that it is around."""

    def __init__(self, name: str = "", log: list[object] | None = None) -> None:
        self.name, self.seen, self.log = name, [], log if log is not None else []

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, index, micro_batch, forward_only):
        self.log.append(f"{self.name} before")
        result = yield
        self.log.append(f"{self.name} after")
        self.seen.append((index, micro_batch.lengths, micro_batch.is_filler, forward_only))
        return result


@pytest.fixture
def make():
    """`make(**settings)`: an initialised bigram engine."""

    def build(engine=BigramEngine, wrappers=(), **settings):
        with registered(engine):
            made = create(MODEL, {"strategy": "bigram", **settings}, {"lr": 0.1}, wrappers=wrappers)
        made.initialize()
        return made

    return build


def test_two_engines_one_wrapped(make):
    observer = Observer()
    wrapped, bare = make(wrappers=[observer]), make()
    bare.train_batch(sequences(3, 4), SFTLoss())
    assert observer.seen == []
    metrics = wrapped.train_batch(sequences(3, 4), SFTLoss())
    assert len(observer.seen) == 1
    bare.close()
    again = wrapped.train_batch(sequences(3, 4), SFTLoss())
    assert len(observer.seen) == 2 and again["loss"] < metrics["loss"]


def test_a_wrapper_sees_every_micro_batch(make):
    engine = make(wrappers=[observer := Observer()], micro_batch_size=2)
    batch = sequences(3, 5, 2, 4, 7)
    engine.train_batch(batch, SFTLoss())
    engine.infer_batch(batch)
    for forward_only in (False, True):
        seen = [entry for entry in observer.seen if entry[3] is forward_only]
        assert [index for index, *_ in seen] == [0, 1, 2]
        assert sorted(n for _, lengths, *_ in seen for n in lengths) == [2, 3, 4, 5, 7]
        assert all(1 <= len(lengths) <= 2 for _, lengths, *_ in seen)


def test_fillers_are_seen_and_marked(make):
    four = type("Four", (BigramEngine,), {"rules": MicroBatchRules(at_least=4)})
    engine, plain = make(four, wrappers=[observer := Observer()]), make()
    metrics = engine.train_batch(sequences(5, 3), SFTLoss())
    assert [filler for _, _, filler, _ in observer.seen].count(True) == 2 and len(observer.seen) == 4
    expected = plain.train_batch(sequences(5, 3), SFTLoss())
    assert metrics.pop("skipped_step") is expected.pop("skipped_step") is None
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_the_last_wrapper_is_outermost(make):
    log: list[object] = []
    engine = make(wrappers=[Observer("first", log), Observer("second", log)])
    engine.infer_batch(sequences(3))
    assert log == ["second before", "first before", "first after", "second after"]


def test_unwrap(make):
    engine = make()
    engine.wrap(observer := Observer())
    engine.infer_batch(sequences(3))
    engine.unwrap(observer)
    engine.infer_batch(sequences(3))
    assert len(observer.seen) == 1


def test_a_wrapper_needs_no_hash(make):
    class Unhashable(Observer):
        __hash__ = None

    make(wrappers=[observer := Unhashable()]).close()
    assert observer.seen == []


def test_a_wrapper_may_change_what_passes(make):
    class Uncertain:
        @hookimpl(wrapper=True)
        def forward_micro_batch(self):
            outputs = yield
            return outputs.map(torch.zeros_like)

    class NeverSteps:
        @hookimpl(wrapper=True)
        def step(self):
            result: StepResult = yield
            return StepResult(result.grad_norm, result.lr, "non_finite")

    engine = make(wrappers=[Uncertain(), NeverSteps()])
    assert engine.infer_batch(sequences(3)).outputs.log_probs.tolist() == [0, 0, 0]
    engine.unwrap(next(p for p in engine._manager.get_plugins() if isinstance(p, Uncertain)))
    assert engine.train_batch(sequences(3), SFTLoss())["skipped_step"] == "non_finite"


def test_an_error_passes_through_wrappers(make):
    class Fault:
        @hookimpl(wrapper=True)
        def forward_micro_batch(self, index):
            if index == 1:
                raise OSError("planted")
            return (yield)

    engine = make(wrappers=[Observer(), fault := Fault()], micro_batch_size=1)
    with pytest.raises(OSError, match="planted"):
        engine.train_batch(sequences(3, 4), SFTLoss())
    engine.unwrap(fault)
    with make(micro_batch_size=1) as untouched:
        expected = untouched.train_batch(sequences(3, 4), SFTLoss())
    assert engine.train_batch(sequences(3, 4), SFTLoss()) == expected, "the failed step left something behind"


def test_chrome_trace(make, tmp_path):
    engine = make(micro_batch_size=2)
    engine.wrap(ChromeTracer(tmp_path / "trace.json", rank=3))
    engine.train_batch(sequences(3, 5, 2, 4, 7), SFTLoss())
    engine.infer_batch(sequences(6))
    whole_until_here = (tmp_path / "trace.json").read_text()
    engine.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(whole_until_here.rstrip().rstrip(",") + "]") == events[: whole_until_here.count("\n") - 1]
    assert {event["pid"] for event in events} == {3}
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == [
        *("micro-batch 0", "micro-batch 1", "micro-batch 2", "forward_backward", "step"),
        *("micro-batch 0", "infer"),
    ]
    assert sum(event["args"]["tokens"] for event in spans[:3]) == 21 == spans[3]["args"]["tokens"]
    assert spans[4]["args"]["lr"] == 0.1
    for micro_batch in spans[:3]:
        assert spans[3]["ts"] <= micro_batch["ts"]
        assert micro_batch["ts"] + micro_batch["dur"] <= spans[3]["ts"] + spans[3]["dur"] <= spans[4]["ts"]


def test_a_trace_on_a_full_disk_is_the_users_to_mend(make):
    with pytest.raises(ConfigError, match=r"the trace /proc/no/trace.json can't be written: "):
        ChromeTracer("/proc/no/trace.json")
    engine = make(micro_batch_size=1)
    engine.wrap(ChromeTracer("/dev/full"))
    with pytest.raises(ConfigError, match="the trace /dev/full can't be written: No space left on device"):
        engine.train_batch(sequences(3), SFTLoss())
