"""What the benchmarks of training steps share: a model of laptop size, batches of log-normal lengths, a stopwatch."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engines.batch import Batch

SEED = 0
VOCAB = 4096
OPTIMIZER = {"lr": 1e-4, "clip_grad": 1.0}
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}


@contextmanager
def model_folder(**sizes: int) -> Iterator[Path]:
    """A saved llama with random weights, of `SIZES` unless said otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
        yield Path(folder)


def batches(count: int, samples: int, mean: float, spread: float) -> list[Batch]:
    """`count` batches of `samples` sequences with log-normal lengths around `mean`; about half are targets."""
    draw = random.Random(SEED)
    generator = torch.Generator().manual_seed(SEED)

    def sequence() -> dict[str, Any]:
        length = min(2048, max(2, round(mean * draw.lognormvariate(-(spread**2) / 2, spread))))
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        return {"input_ids": ids, "loss_mask": torch.arange(length) >= length // 2}

    return [Batch.from_sequences([sequence() for _ in range(samples)]) for _ in range(count)]


def all_targets(batch: Batch) -> Batch:
    """`batch` with every token a target that can be one."""
    return batch.with_tokens(loss_mask=torch.ones_like(batch["loss_mask"]))


def plain_update(model: torch.nn.Module) -> Callable[[torch.Tensor], float]:
    """What ends a step of a loop without engines: backward, clipping, torch's fused AdamW. Returns the loss."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=OPTIMIZER["lr"], weight_decay=0.0, fused=True)

    def update(loss: torch.Tensor) -> float:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return update


def paired_cpu_seconds(
    one: Callable[[Batch], float],
    other: Callable[[Batch], float],
    over: Sequence[Batch],
    *,
    warm_up: int = 2,
    tolerance: float = 1e-4,
) -> tuple[list[float], list[float]]:
    """CPU seconds of both on each batch, taking turns at being first; their losses must agree.

    `tolerance`: the largest relative difference of losses. The first `warm_up` batches are not counted.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for index, batch in enumerate(over):
        losses = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.process_time()
            losses[which] = (one, other)[which](batch)
            if index >= warm_up:
                seconds[which].append(time.process_time() - start)
        if abs(losses[0] - losses[1]) > tolerance * abs(losses[1]):
            raise SystemExit(f"step {index}: the losses {losses} differ, so the two don't do the same")
    return seconds


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
