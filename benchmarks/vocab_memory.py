"""Peak memory of training with a vocabulary of 150k, against the plain loop.

Each side takes two steps on the same batch, in a process of its own. `stays` is its resident memory with the model
loaded and a first short step taken; `a step` is how far its highest resident memory rises above that (Linux: VmHWM).
The plain loop gives the batch to transformers' model with labels, which computes the logits of every token in
float32. Goal: at most half of its memory, of a step and of the whole process.

    OMP_NUM_THREADS=1 python benchmarks/vocab_memory.py [--tokens N] [--check]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
from support.memory import peak, reset_peak
from support.workload import OPTIMIZER, model_folder, plain_update

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.worker import TrainingWorker

GOAL = 0.5
VOCAB = 150_000
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SEQUENCE = 256
MIB = 2**20


def batch_of(tokens: int) -> Batch:
    """Sequences of equal length, every token a target."""
    ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(0))
    length = min(tokens, SEQUENCE)
    return Batch.from_sequences([{"input_ids": row, "loss_mask": row >= 0} for row in ids.split(length)])


def worker_step(folder: str) -> Callable[[Batch], float]:
    """Steps through `TrainingWorker`."""
    worker = TrainingWorker({"path": folder}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER)
    worker.initialize()
    return lambda batch: worker.train_mini_batch(batch, SFTLoss())["loss"]


def plain_step(folder: str) -> Callable[[Batch], float]:
    """Steps of the plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    update = plain_update(model)

    def step(batch: Batch) -> float:
        ids = batch.to_padded("input_ids")
        return update(model(input_ids=ids, labels=ids, use_cache=False).loss)

    return step


STEPS = {"plain": plain_step, "worker": worker_step}


def measure(side: str, folder: str, tokens: int) -> None:
    """In a fresh process: print the memory that a step takes beyond what stays, that which stays, and the loss."""
    torch.set_num_threads(1)
    step = STEPS[side](folder)
    step(batch_of(32))
    reset_peak()
    stays = peak()
    losses = [step(batch_of(tokens)) for _ in range(2)]
    print(peak() - stays, stays, losses[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="exit code 1 if it takes more than is allowed")
    parser.add_argument("--side", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens % SEQUENCE:
        parser.error(f"--tokens must be a multiple of {SEQUENCE}, so that the plain loop has nothing to pad")
    if arguments.side:
        measure(arguments.side, arguments.folder, arguments.tokens)
        return 0
    found = {}
    with model_folder(**SIZES) as folder:
        for side in STEPS:
            command = [sys.executable, __file__, "--tokens", str(arguments.tokens)]
            command += ["--side", side, "--folder", str(folder)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side] = [float(word) for word in output.split()[-3:]]
    if abs(found["worker"][2] - found["plain"][2]) > 1e-4:
        raise SystemExit(f"the losses differ, so the two don't do the same: {found}")
    print(f"{'MiB':<16}{'a step':>10}{'stays':>10}   {arguments.tokens} tokens, vocabulary {VOCAB}")
    for side, (step, stays, _) in found.items():
        print(f"{side:<16}{step / MIB:>10.0f}{stays / MIB:>10.0f}")
    share = found["worker"][0] / found["plain"][0]
    whole = sum(found["worker"][:2]) / sum(found["plain"][:2])
    print(f"share of the plain loop: {share:.3f} of a step, {whole:.3f} of the whole process; goal: at most {GOAL}")
    return int(arguments.check and max(share, whole) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
