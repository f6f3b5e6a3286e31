"""`TrainingWorker` on one process: what it chooses, in which order it starts, and how it cuts a batch."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, OptimizerConfig, auto_select
from engines.contract import hookimpl
from engines.devices import DeviceSpec
from engines.errors import BatchError, CapabilityError, ContractError, EngineNotFound, LaunchError
from engines.losses import SFTLoss
from engines.worker import TrainingWorker
from support.bigram import MODEL, BigramEngine, registered, sequences

BIGRAM = {"strategy": "bigram", "device": "cpu"}
LENGTHS = (3, 4, 5, 6, 7)


class Lengths:
    """Notes the lengths of each step's sequences."""

    def __init__(self):
        self.steps = []

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, micro_batch):
        self.steps.append(micro_batch.lengths)
        return (yield)


def cut(**how):
    """The lengths that each step of `train_batch` saw, and the metrics."""
    seen = Lengths()
    with registered(), TrainingWorker(MODEL, BIGRAM, {"lr": 0.1, "warmup_steps": 9}, wrappers=[seen]) as worker:
        worker.initialize()
        metrics = worker.train_batch(sequences(*LENGTHS), SFTLoss(), mini_batch_size=2, **how)
    return seen.steps, metrics


def test_a_batch_is_cut_into_mini_batches():
    steps, metrics = cut()
    assert steps == [[3, 4], [5, 6], [7]]
    assert [one["tokens"] for one in metrics] == [7, 11, 7]
    assert [one["lr"] for one in metrics] == pytest.approx([0.1 / 9, 0.2 / 9, 0.3 / 9])


def test_epochs_and_shuffling():
    assert cut(epochs=2)[0] == 2 * [[3, 4], [5, 6], [7]]
    shuffled = cut(epochs=2, shuffle_seed=1)[0]
    first, second = ([n for step in epoch for n in step] for epoch in (shuffled[:3], shuffled[3:]))
    assert sorted(first) == sorted(second) == list(LENGTHS)
    assert len({tuple(LENGTHS), tuple(first), tuple(second)}) == 3
    assert cut(epochs=2, shuffle_seed=1)[0] == shuffled != cut(epochs=2, shuffle_seed=2)[0]


def test_groups_stay_together():
    """Sequences 0 and 3 in one group, 1 and 4 in another: the same step, rank and micro-batch, whatever is cut."""
    seen = Lengths()
    batch = sequences(*LENGTHS).with_sequences(group=torch.tensor([7, 8, 9, 7, 8]))
    with (
        registered(),
        TrainingWorker(MODEL, {**BIGRAM, "micro_batch_size": 2}, {"lr": 0.1}, wrappers=[seen]) as worker,
    ):
        worker.initialize()
        worker.train_batch(batch, SFTLoss(), mini_batch_size=2)
        worker.train_mini_batch(batch, SFTLoss())
        with pytest.raises(BatchError, match=r"sequences 0, 3 form one group.* at most 1"):
            worker.train_batch(batch, SFTLoss(), mini_batch_size=1)
    assert seen.steps == [[3, 6], [4, 7], [5]] * 2


def test_without_a_strategy_the_best_engine_is_taken():
    with registered(priority=900):
        assert auto_select(MODEL, "cpu") == (EngineConfig(strategy="bigram", device="cpu"), OptimizerConfig())
        with TrainingWorker(MODEL, {"device": "cpu"}) as worker:
            assert worker.selection.backend == "bigram"
    with registered(priority=1):
        assert auto_select(MODEL, "cpu")[0].strategy != "bigram"
    with pytest.raises(EngineNotFound):
        auto_select(MODEL, "cpu", model_type="no_such_model")


def test_the_engine_is_prepared_before_its_device_is_used():
    there = []
    with registered(prepare=lambda: there.append(dist.is_initialized())):
        TrainingWorker(MODEL, BIGRAM).close()
    assert there == [False]


def test_determinism_needs_an_engine_that_declares_it():
    with registered(), pytest.raises(CapabilityError, match="needs the capability deterministic, which bigram lacks"):
        TrainingWorker(MODEL, BIGRAM, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled() and not dist.is_initialized()


def test_refused_wrappers_leave_nothing_behind():
    class Loud(BigramEngine):
        def __init__(self, ctx):
            raise AssertionError("constructed")

    with registered(Loud), pytest.raises(ContractError, match="wraps no hook"):
        TrainingWorker(MODEL, BIGRAM, wrappers=[object()])
    assert not dist.is_initialized()


def abacus(module):
    """A device of a plugin's own, which is the CPU in torch."""
    spec = DeviceSpec("abacus", 1, ("/dev/null",), module, "gloo", None, "cpu")
    return registered(device="abacus", devices=[spec])


def test_the_module_of_a_device_is_imported(tmp_path, monkeypatch):
    (tmp_path / "torch_abacus.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with abacus("torch_abacus"), TrainingWorker(MODEL, {"strategy": "bigram", "device": "abacus"}) as worker:
        assert "torch_abacus" in sys.modules
        assert worker.device == torch.device("cpu") and worker.selection.device == "abacus"
    del sys.modules["torch_abacus"]


def test_fewer_devices_than_ranks(monkeypatch):
    from types import SimpleNamespace

    spec = DeviceSpec("chip", 1, ("/dev/null",), "torch", "gloo", None, "meta")
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setenv("LOCAL_RANK", "2")
    said = r"local rank 2 needs a chip device of its own, and torch sees 2\nStart at most 2 processes"
    with registered(device="chip", devices=[spec]), pytest.raises(LaunchError, match=said):
        TrainingWorker(MODEL, {"strategy": "bigram", "device": "chip"})


def test_a_device_whose_module_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "torch_abacus.py").write_text("import absent_beads")
    monkeypatch.syspath_prepend(tmp_path)
    said = r'"abacus" needs the module torch_abacus, which cannot be imported: .*absent_beads'
    with abacus("torch_abacus"), pytest.raises(LaunchError, match=said):
        TrainingWorker(MODEL, {"strategy": "bigram", "device": "abacus"})


def test_a_layout_that_was_not_built_is_said_before_training():
    """By whoever describes the run: an engine that ignores a size which it declares has the right numbers."""
    chunks = {**BIGRAM, "virtual_pipeline_parallel_size": 2}
    with registered(capabilities=["virtual_pipeline_parallel"]), TrainingWorker(MODEL, chunks) as worker:
        worker.initialize()
        with pytest.raises(ContractError, match=r"virtual_pipeline_parallel_size is 1 instead of 2\nAsk"):
            worker.describe()
    with registered(), TrainingWorker(MODEL, BIGRAM) as worker:
        worker.initialize()
        assert worker.describe()["layout"]["data_parallel_size"] == 1
