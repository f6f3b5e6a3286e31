"""A replica of two ranks, of which one holds the outputs: what is shared with the other, and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engines import create
from engines.contract import MicroResult, Ranks
from engines.losses import SFTLoss
from support.bigram import MODEL, BigramEngine, registered, sequences

OUTPUT_RANK = 1
BATCH = (3, 5, 2, 4)


class Pair(BigramEngine):
    """Like the last of two pipeline stages: both ranks compute, rank 1 alone has results, and a metric of its own."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self.ranks = Ranks(0, 1, None, dist.group.WORLD, OUTPUT_RANK, dist.get_rank() == OUTPUT_RANK)

    def forward_backward_batch(self, micro_batches, loss, needs, forward_only):
        results = super().forward_backward_batch(micro_batches, loss, needs, forward_only)
        if not self.ranks.is_output:
            return None
        return [
            MicroResult(one.terms, one.outputs, {"seen": torch.tensor(float(i))}) for i, one in enumerate(results)
        ]


def run(engine_class):
    """Inference with and without sharing, a step with what was inferred, and a step without targets."""
    with registered(engine_class, capabilities=["data_parallel", "export"]):
        engine = create(MODEL, {"strategy": "bigram", "micro_batch_size": 2}, {"lr": 0.1})
    with engine:
        engine.initialize()
        batch = sequences(*BATCH)
        alone = engine.infer_batch(batch).outputs
        shared = engine.infer_batch(batch, loss=SFTLoss(), share=True)
        batch = batch.with_tokens(old_log_probs=shared.outputs.log_probs)
        trained = engine.train_batch(batch, SFTLoss())
        empty = engine.train_batch(batch.with_tokens(loss_mask=torch.zeros(sum(BATCH))), SFTLoss())
        return alone, shared, trained, empty


@pytest.fixture(scope="module")
def expected(world):
    return world(1)(run, BigramEngine)[0]


def test_outputs_lie_on_one_rank_unless_they_are_shared(world, expected):
    answers = world(2)(run, Pair)
    assert [alone is not None for alone, *_ in answers] == [False, True]
    for _, shared, *_ in answers:
        assert torch.equal(shared.outputs.log_probs, expected[1].outputs.log_probs)
    assert torch.equal(answers[OUTPUT_RANK][0].log_probs, expected[0].log_probs)


def test_metrics_are_on_every_rank(world, expected):
    for _, shared, trained, empty in world(2)(run, Pair):
        assert shared.metrics == {**expected[1].metrics, "seen": 0.5}
        assert trained == {**expected[2], "seen": 0.5}
        assert empty == expected[3] and empty["skipped_step"] == "empty"
