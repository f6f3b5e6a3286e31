"""Inference is aligned, in order, the same on every rank, and leaves no trace."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.batch import TokenOutputs
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.explaining import moved
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.runs import OPTIMIZER, pack, same_bits, weights_of
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

RELATIVE, ABSOLUTE = 1e-5, 1e-5
"""Tolerances of log-probabilities, whose size is about 5."""


@cache
def _plain_log_probs(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return torch.cat([plain.log_probs(model, sample.input_ids) for sample in mini_batches()[0]])


def infer(folder: Path, settings: dict[str, Any]) -> tuple[TokenOutputs | None, TokenOutputs | None, bool]:
    batch = pack(mini_batches()[0])
    with TrainingWorker({"path": str(folder)}, settings) as worker:
        worker.initialize()
        engine = worker.engine
        alone = engine.infer_batch(batch.select(range(engine.ranks.dp_rank, len(batch), engine.ranks.dp_size)))
        return worker.infer_batch(batch).outputs, alone.outputs, engine.ranks.is_output


@clause("engines.batch:TokenOutputs")
def test_outputs_are_aligned_and_in_order(subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """`log_probs[i]` is log p(input_ids[i] | the tokens before it in its sequence), 0 for a sequence's first token,
    in the order of the batch, whatever micro-batches it was cut into and whatever ranks ran them.
    """
    folder = model(subject.family_at(layout))
    expected, batch = _plain_log_probs(folder), pack(mini_batches()[0])
    for rank, (shared, _, _) in enumerate(
        on_ranks(layout, infer, folder, subject.settings(layout, micro_batch_size=3))
    ):
        assert shared is not None and shared.log_probs is not None, f"rank {rank} has no outputs"
        off = (shared.log_probs - expected).abs()
        worst = int(off.argmax())
        assert bool((off <= ABSOLUTE + RELATIVE * expected.abs()).all()), (
            f"on rank {rank} log_probs[{worst}] is {shared.log_probs[worst]:.6f} instead of {expected[worst]:.6f}; "
            f"{int((off > ABSOLUTE + RELATIVE * expected.abs()).sum())} of {len(expected)} tokens are off"
            f"{moved(shared.log_probs, expected, batch.lengths, RELATIVE)}"
        )
        assert not shared.log_probs[batch.cu_seqlens[:-1]].any(), (
            "a sequence's first token has log-probability 0: nothing predicts it"
        )


@clause("engines.contract:Ranks")
def test_outputs_are_on_output_ranks(
    subject: Subject, parallel_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """The output rank of each replica holds the outputs of its replica's samples, without being asked to share them;
    what is shared is equal to the bit on every rank.
    """
    settings = subject.settings(parallel_layout)
    answers = on_ranks(parallel_layout, infer, model(subject.family_at(parallel_layout)), settings)
    first = answers[0][0]
    assert first is not None and first.log_probs is not None, "rank 0 has no outputs"
    for rank, (shared, alone, is_output) in enumerate(answers):
        assert shared is not None and shared.log_probs is not None, f"rank {rank} has no outputs"
        assert torch.equal(shared.log_probs, first.log_probs), f"ranks 0 and {rank} have other outputs"
        assert alone is not None or not is_output, f"rank {rank} is an output rank without outputs"


def infer_between(folder: Path, settings: dict[str, Any], inferring: bool) -> tuple[float, dict[str, Tensor]]:
    """Between the gradients of a step and the step."""
    first, second, third = (pack(samples) for samples in mini_batches())
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        worker.train_mini_batch(first, SFTLoss())
        engine = worker.engine
        share = second.select(range(engine.ranks.dp_rank, len(second), engine.ranks.dp_size))
        with engine.train_mode():
            engine.forward_backward(share, SFTLoss())
            if inferring:
                before, drawn = weights_of(worker), (random.getstate(), torch.get_rng_state())
                worker.infer_batch(third)
                worker.evaluate(first, SFTLoss())
                assert same_bits(weights_of(worker), before), "inference changed weights"
                assert random.getstate() == drawn[0], "inference drew from Python's random numbers"
                assert torch.equal(torch.get_rng_state(), drawn[1]), "inference drew from torch's random numbers"
                assert torch.is_grad_enabled(), "inference switched gradients off for good"
        step = engine.optimizer_step()
        return step.grad_norm, weights_of(worker)


@clause("engines.engine:Engine.infer_batch")
def test_inference_leaves_no_trace(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """Weights, accumulated gradients, optimizer, random states and modes are as they were before: a step whose
    gradients wait while something else is inferred is equal to the bit.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=2)
    found, expected = (on_ranks(some_layout, infer_between, folder, settings, flag)[0] for flag in (True, False))
    assert found[0] == expected[0], f"the gradient norm of the step is {found[0]} instead of {expected[0]}"
    assert same_bits(found[1], expected[1]), "the weights after the step differ"


def infer_again(folder: Path, settings: dict[str, Any], before: bool) -> Tensor:
    first, second, _ = (pack(samples) for samples in mini_batches())
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        old = worker.infer_batch(first).outputs if before else None
        worker.train_mini_batch(second, SFTLoss())
        outputs = worker.infer_batch(first).outputs
        assert outputs is not None and outputs.log_probs is not None
        if old is not None:
            assert old.log_probs is not None
            assert not torch.equal(outputs.log_probs, old.log_probs), "the step changed no output"
        return outputs.log_probs


@clause("engines.engine:Engine.infer_batch")
def test_inference_answers_for_the_newest_weights(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """After a step the new weights answer: nothing that an earlier inference gathered, cast or cached outlives it."""
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    found, expected = (on_ranks(some_layout, infer_again, folder, settings, flag)[0] for flag in (True, False))
    assert torch.equal(found, expected), f"log-probabilities are off by {(found - expected).abs().max():.2e}"
