"""Steps that must change nothing: without any target, and with gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.testing.runs import OPTIMIZER, pack, same_bits, weights_of
from engines.testing.samples import masked, mini_batches
from engines.worker import TrainingWorker
from support.megatron import settings

FSDP2 = {"strategy": "fsdp2", "device": "cpu", "micro_batch_size": 2}
SCHEDULE = {**OPTIMIZER, "warmup_steps": 4, "weight_decay": 0.1}
"""With a schedule and a decay, so that a skipped step that counted, or decayed, would show."""


class Scaled(SFTLoss):
    """Cross entropy with a factor per sequence: inf or NaN in one sequence reaches the gradients of one rank."""

    fields = frozenset({"loss_mask", "factor"})
    equal_weights = False

    def __call__(self, out, batch):
        parts = zip(out.log_probs.split(batch.lengths), batch["loss_mask"].split(batch.lengths), strict=True)
        sums = [-values[mask].sum() * factor for (values, mask), factor in zip(parts, batch["factor"], strict=True)]
        return {"cross_entropy": sum(sums)}


def scaled(samples, factor: float) -> Batch:
    """The samples, the first one's loss times `factor`."""
    factors = torch.ones(len(samples))
    factors[0] = factor
    return pack(samples).with_sequences(factor=factors)


def steps(folder, batches, engine):
    """Each batch's metrics, whether the weights are to the bit as before, and the weights in the end."""
    with TrainingWorker({"path": str(folder)}, engine, SCHEDULE) as worker:
        worker.initialize()
        seen, before = [], weights_of(worker)
        for batch in batches:
            metrics = worker.train_mini_batch(batch, Scaled())
            after = weights_of(worker)
            seen.append((metrics, same_bits(before, after)))
            before = after
        return seen, before


ONE, TWO, _ = mini_batches()
SKIPPED = {
    "masked": (scaled(masked(ONE), 1.0), "empty"),
    "nothing": (scaled(ONE, 1.0).select([]), "empty"),
    "inf": (scaled(ONE, math.inf), "non_finite"),
    "nan": (scaled(ONE, math.nan), "non_finite"),
}


ENGINES = {
    "fsdp2": (2, FSDP2),
    "fsdp2 replicated": (4, {**FSDP2, "data_parallel_replicate_size": 2}),
    "megatron tp2 sp": (2, settings("tp2 sp", micro_batch_size=2)),
    "megatron pp2": (2, settings("pp2", micro_batch_size=2)),
    "megatron dp2 distributed": (2, settings("dp2", micro_batch_size=2, distributed_optimizer=True)),
    "megatron ep2": (2, settings("ep2", micro_batch_size=2)),
    "megatron pp2 dp2 distributed": (4, settings("pp2 dp2 distributed", micro_batch_size=2)),
}
FAMILIES = {"megatron ep2": "qwen3_moe"}
"""Models other than qwen3."""


OFTEN = {("inf", "megatron tp2 sp"), ("nothing", "megatron pp2"), ("inf", "megatron ep2")}
"""What `make test` runs on Megatron."""


def _cases():
    for name in SKIPPED:
        for engine, (processes, _) in ENGINES.items():
            often = (name, engine) in OFTEN or not engine.startswith("megatron")
            rare = not often or (name, processes) in (("masked", 4), ("nan", 2))
            yield pytest.param(name, engine, marks=pytest.mark.more if rare else (), id=f"{name}, {engine}")


@pytest.mark.parametrize(("name", "engine"), list(_cases()))
def test_a_skipped_step_changes_nothing(name, engine, world, folder):
    batch, reason = SKIPPED[name]
    good = [scaled(ONE, 1.0), scaled(TWO, 1.0)]
    (processes, how), model = ENGINES[engine], folder(FAMILIES.get(engine, "qwen3"))
    run = world(processes)
    everyone = run(steps, model, [batch, good[0], batch, good[1]], how)
    expected, weights = run(steps, model, good, how)[0]
    for seen, after in everyone:
        for metrics, unchanged in (seen[0], seen[2]):
            assert metrics["skipped_step"] == reason and unchanged
            if reason == "empty":
                assert metrics["loss"] == metrics["grad_norm"] == 0.0
            else:
                assert not math.isfinite(metrics["grad_norm"])
        assert [seen[1], seen[3]] == expected, "loss, gradient norm or rate of the other steps differ"
        assert not expected[0][1] and same_bits(after, weights)
        assert seen[0][0]["lr"] == seen[1][0]["lr"] != seen[2][0]["lr"] == seen[3][0]["lr"]


def some_masked(folder):
    """One step in which only one of the ranks has targets."""
    with TrainingWorker({"path": str(folder)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker:
        worker.initialize()
        share = pack(ONE if worker.rank == 0 else masked(ONE))
        return worker.engine.train_batch(share, SFTLoss())


def test_ranks_without_targets_take_part(world, folder, reference_run):
    for metrics in world(2)(some_masked, folder("llama")):
        assert metrics["skipped_step"] is None
        expected = reference_run("llama", 8)
        assert metrics["loss"] == pytest.approx(expected.losses[0], rel=2e-6)
        assert metrics["grad_norm"] == pytest.approx(expected.grad_norms[0], rel=2e-6)
