"""What packing gains over padding: a step through `TrainingWorker` against the usual padded loop.

One process, fsdp2, float32, one thread; lengths are log-normal. The padded loop pads each batch on the right to its
longest sequence, calls transformers' model with an attention mask, and takes the cross entropy of its logits. Both
see the same batches, interleaved; CPU times. Goal: the speed-up is at least 0.9 of padded / real tokens.

    OMP_NUM_THREADS=1 python benchmarks/padding_gain.py [--steps N] [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from support.workload import OPTIMIZER, batches, model_folder, paired_cpu_seconds, plain_update, quartiles
from torch.nn.functional import cross_entropy

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.worker import TrainingWorker

GOAL = 0.9
IGNORED = -100


def padded(folder: Path) -> Callable[[Batch], float]:
    """A step of the padded loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    update = plain_update(model)

    def step(batch: Batch) -> float:
        ids = batch.to_padded("input_ids")
        mask = batch.to_padded(torch.ones(batch.num_tokens, dtype=torch.int64))
        labels = batch.to_padded(batch["input_ids"].masked_fill(~batch["loss_mask"], IGNORED), padding=IGNORED)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return update(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED))

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="exit code 1 if it gains less than is asked")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    over = batches(arguments.steps + 2, samples=8, mean=120, spread=0.8)
    with (
        model_folder() as folder,
        TrainingWorker({"path": str(folder)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker,
    ):
        worker.initialize()
        loss = SFTLoss()
        theirs, ours = paired_cpu_seconds(
            padded(folder), lambda batch: worker.train_mini_batch(batch, loss)["loss"], over
        )
    real = sum(batch.num_tokens for batch in over[2:])
    wide = sum(max(batch.lengths) * len(batch) for batch in over[2:])
    share = (sum(theirs) / sum(ours)) / (wide / real)
    each = [
        a / b / (max(batch.lengths) * len(batch) / batch.num_tokens)
        for a, b, batch in zip(theirs, ours, over[2:], strict=True)
    ]
    low, median, high = quartiles(each)
    print(f"{'':<16}{'tokens':>10}{'CPU s':>10}   {len(ours)} steps")
    print(f"{'padded loop':<16}{wide:>10}{sum(theirs):>10.1f}")
    print(f"{'TrainingWorker':<16}{real:>10}{sum(ours):>10.1f}")
    print(f"{'ratio':<16}{wide / real:>10.2f}{sum(theirs) / sum(ours):>10.2f}")
    print(f"share of the possible gain: {share:.2f}, by step {median:.2f} ({low:.2f} to {high:.2f}); goal: {GOAL}")
    return int(arguments.check and share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
