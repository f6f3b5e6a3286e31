"""Inference on a real engine: aligned, in order, shared with every rank, and without a trace."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.testing.plain import log_probs
from engines.testing.runs import OPTIMIZER, pack, same_bits, weights_of
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder, tiny_model
from engines.worker import TrainingWorker

ENGINE = {"strategy": "fsdp2", "device": "cpu", "micro_batch_size": 2}
SAMPLES = mini_batches()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected():
    """Log-probabilities and entropies of the plain model, sequence by sequence."""
    model = tiny_model("qwen3")
    entropies = []
    for sample in SAMPLES:
        with torch.no_grad():
            logs = model(torch.tensor([sample.input_ids])).logits[0, :-1].log_softmax(-1)
        entropies.append(torch.cat([torch.zeros(1), -(logs.exp() * logs).sum(-1)]))
    return torch.cat([log_probs(model, sample.input_ids) for sample in SAMPLES]), torch.cat(entropies)


def infer(folder, samples, engine):
    with TrainingWorker({"path": str(folder)}, engine) as worker:
        worker.initialize()
        outputs = worker.infer_batch(pack(samples), needs={"log_probs", "entropy"}).outputs
        return outputs.log_probs, outputs.entropy


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 120}], ids=str)
def test_outputs_are_aligned_and_in_order(processes, cut, world, folder, expected):
    engine = {"strategy": "fsdp2", "device": "cpu", **cut}
    every = world(processes)(infer, folder, SAMPLES, engine)
    for found in every:
        for value, truth, first in zip(found, expected, every[0], strict=True):
            torch.testing.assert_close(value, truth, rtol=1e-5, atol=5e-6)
            assert torch.equal(value, first), "ranks disagree"
    starts = pack(SAMPLES).cu_seqlens[:-1]
    assert not any(value[starts].any() for value in every[0])


def test_fewer_sequences_than_ranks(world, folder, expected):
    for log_probs_found, _ in world(3)(infer, folder, SAMPLES[:1], ENGINE):
        torch.testing.assert_close(log_probs_found, expected[0][: len(SAMPLES[0].input_ids)], rtol=1e-5, atol=5e-6)


def infer_nothing(folder):
    with TrainingWorker({"path": str(folder)}, ENGINE) as worker:
        worker.initialize()
        return worker.infer_batch(Batch.empty(), loss=SFTLoss())


def test_no_sequence_at_all(world, folder):
    for result in world(2)(infer_nothing, folder):
        assert result.outputs.log_probs.shape == (0,)
        assert result.metrics == {"tokens": 0, "targets": 0, "loss": 0.0, "loss/cross_entropy": 0.0}


def infer_between(folder, with_inference):
    """A step whose gradients lie there while something else is inferred; then another one."""
    batch = pack(SAMPLES)
    with TrainingWorker({"path": str(folder)}, ENGINE, OPTIMIZER) as worker:
        worker.initialize()
        worker.train_mini_batch(batch, SFTLoss())
        share = worker._share(batch)
        with worker.engine.train_mode():
            worker.engine.forward_backward(share, SFTLoss())
            if with_inference:
                before = weights_of(worker)
                generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
                worker.infer_batch(pack(mini_batches()[1]))
                worker.evaluate(pack(mini_batches()[2]), SFTLoss())
                assert same_bits(weights_of(worker), before)
                assert generators == (
                    random.getstate(),
                    np.random.get_state()[1].tolist(),
                    torch.get_rng_state().tolist(),
                )
                assert worker.engine._mode == "train" and worker.engine._base._model.training
                assert torch.is_grad_enabled()
        step = worker.engine.optimizer_step()
        return step.grad_norm, weights_of(worker)


def test_inference_leaves_no_trace(world, folder):
    with_it, without = (world(2)(infer_between, folder, flag)[0] for flag in (True, False))
    assert with_it[0] == without[0] and same_bits(with_it[1], without[1])


class Surrogate:
    """PPO's ratio, unclipped, and how far the policy is from the one that sampled."""

    needs = frozenset({"log_probs"})
    fields = frozenset({"old_log_probs", "loss_mask"})
    targets_only = True
    equal_weights = False
    coefficients: ClassVar = {"surrogate": 1.0, "gap": 0.0}

    def denominators(self, batch):
        return dict.fromkeys(self.coefficients, batch["loss_mask"].sum())

    def __call__(self, out, batch):
        mask = batch["loss_mask"]
        gap = out.log_probs[mask] - batch["old_log_probs"][mask]
        return {"surrogate": -gap.exp().sum(), "gap": gap.abs().sum()}


def rollout_step(folder, engine):
    batch = pack(SAMPLES)
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        old = worker.infer_batch(batch).outputs.log_probs
        batch = batch.with_tokens(old_log_probs=old)
        return [worker.train_mini_batch(batch, Surrogate()) for _ in range(2)]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=str)
def test_infer_then_train(processes, options, world, folder):
    """On-policy: the update's first pass sees the log-probabilities that the inference pass reported."""
    for first, second in world(processes)(rollout_step, folder, {**ENGINE, **options}):
        assert first["loss/gap"] < 1e-6
        assert first["loss"] == first["loss/surrogate"] == pytest.approx(-1, abs=1e-6)
        assert second["loss/gap"] > 1e-3


def losses(folder):
    batch = pack(SAMPLES)
    with TrainingWorker({"path": str(folder)}, ENGINE, OPTIMIZER) as worker:
        worker.initialize()
        return worker.evaluate(batch, SFTLoss()), worker.train_mini_batch(batch, SFTLoss())


def test_metrics(world, folder):
    for evaluated, trained in world(2)(losses, folder):
        assert list(evaluated) == ["tokens", "targets", "loss", "loss/cross_entropy"]
        assert list(trained) == [
            *("loss", "grad_norm", "lr", "skipped_step"),
            *("tokens", "targets", "loss/cross_entropy"),
        ]
        assert evaluated["loss"] == pytest.approx(trained["loss"], rel=1e-7)
        assert trained["tokens"] == sum(len(sample.input_ids) for sample in SAMPLES) == evaluated["tokens"]
        assert trained["targets"] == sum(sample.num_targets for sample in SAMPLES) == evaluated["targets"]
        assert trained["loss/cross_entropy"] == trained["loss"] and trained["lr"] == OPTIMIZER["lr"]
