"""What a step through `TrainingWorker` costs, against a hand-written loop with the same math and packing.

One process, fsdp2, float32, one thread. The hand-written loop holds plain transformers modules and torch's fused
AdamW; it uses the same packed attention and the same head as the engine, and knows nothing of engines, batches'
shares, plans, hooks or shards. Compared are CPU times of steps on the same batches, interleaved; goal: the median of
the paired ratios is at most 1.02.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py [--steps N] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from support.workload import OPTIMIZER, batches, model_folder, paired_cpu_seconds, plain_update, quartiles

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.models import attention, linear_log_probs
from engines.worker import TrainingWorker

GOAL = 1.02


def hand_written(folder: Path) -> Callable[[Batch], float]:
    """A step of the loop that one would write for this model alone, tuned."""
    from transformers import AutoModelForCausalLM

    attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME)
    model.train()
    update = plain_update(model)

    def step(batch: Batch) -> float:
        ids, mask = batch["input_ids"], batch["loss_mask"]
        hidden = model.model(
            input_ids=ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packing=attention.Packing.of(batch.lengths),
        ).last_hidden_state[0]
        targets = mask.nonzero()[:, 0]
        scores, _ = linear_log_probs(
            hidden.index_select(0, targets - 1), model.lm_head.weight, ids[targets], equal_weights=True
        )
        return update(-scores.sum() / len(targets))

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit code 1 if it costs more than is allowed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    over = batches(arguments.steps + 2, samples=8, mean=160, spread=0.8)
    with (
        model_folder() as folder,
        TrainingWorker({"path": str(folder)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker,
    ):
        worker.initialize()
        loss = SFTLoss()
        ours, theirs = paired_cpu_seconds(
            lambda batch: worker.train_mini_batch(batch, loss)["loss"], hand_written(folder), over
        )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, median, high = quartiles(ratios)
    tokens = sum(batch.num_tokens for batch in over) / len(over)
    print(f"{'CPU s per step':<18}{'median':>8}   {tokens:.0f} tokens on average, {len(ratios)} steps")
    print(f"{'TrainingWorker':<18}{statistics.median(ours):>8.3f}")
    print(f"{'hand-written':<18}{statistics.median(theirs):>8.3f}")
    print(f"paired ratio: median {median:.4f}, quartiles {low:.4f} to {high:.4f}; goal: at most {GOAL}")
    return int(arguments.check and median > GOAL)


if __name__ == "__main__":
    sys.exit(main())
