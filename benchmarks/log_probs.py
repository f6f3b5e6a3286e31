"""Log-probabilities of targets from hidden states, forward and backward: time, memory and error of each way.

CPU time in ms, median of interleaved runs on one thread (ratio: median of pairs); memory is what a process of its own
needs beyond its inputs and their gradients, in MiB; error is that of the weight's gradient against float64. Fails if
core's way, as supervised fine-tuning uses it, takes more than 1.02 of the plain way's time or, with the large
vocabulary, half of its memory. (With few rows and a wide model the weight's gradient is what takes memory, whatever
the way.)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, linear_cross_entropy

from engines.models.head import rows_per_chunk
from engines.models.token_outputs import linear_log_probs

SHAPES = {"SmolLM2-135M": (384, 49_152, 576), "150k vocabulary": (256, 151_936, 128)}
RUNS, MOST_TIME, MOST_MEMORY = 9, 1.02, 0.5

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def our_chunks(h: Tensor, w: Tensor) -> torch.nn.LinearCrossEntropyOptions:
    return torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows_per_chunk(len(h), len(w)), chunking_method=None)


def with_entropy(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    log_probs, entropy = linear_log_probs(h, w, t, need_entropy=True)
    assert entropy is not None
    return (0.01 * entropy - log_probs).sum()


DEFAULT = torch.nn.LinearCrossEntropyOptions()
WAYS: dict[str, Way] = {
    "plain: logits of all rows": lambda h, w, t: cross_entropy(linear(h, w), t, reduction="sum"),
    "engines, equal weights": lambda h, w, t: -linear_log_probs(h, w, t, equal_weights=True)[0].sum(),
    "engines, any weights": lambda h, w, t: -linear_log_probs(h, w, t)[0].sum(),
    "engines, with entropy": with_entropy,
    "torch, per token, our chunks": lambda h, w, t: linear_cross_entropy(
        h, w, t, reduction="none", options=our_chunks(h, w)
    ).sum(),
    "torch, per token": lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none", options=DEFAULT).sum(),
    "torch, summed": lambda h, w, t: linear_cross_entropy(h, w, t, reduction="sum", options=DEFAULT),
}
ONCE = {"torch, per token", "torch, summed"}  # they take ten times as long as the rest
PLAIN, OURS = "plain: logits of all rows", "engines, equal weights"


def problem(rows: int, vocabulary: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(rows, hidden, generator=generator)
    w = torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5
    return h.requires_grad_(), w.requires_grad_(), torch.randint(0, vocabulary, (rows,), generator=generator)


def times(shape: tuple[int, int, int]) -> dict[str, list[float]]:
    h, w, t = problem(*shape)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for run in range(RUNS):
        for name, way in WAYS.items():
            if name in ONCE and run > 0:
                continue
            h.grad = w.grad = None
            start = time.process_time()
            way(h, w, t).backward()
            taken[name].append(1000 * (time.process_time() - start))
    return taken


def memory(name: str, shape_name: str) -> float:
    """Runs in a process of its own: its peak can't be taken back."""
    out = subprocess.run([sys.executable, __file__, name, shape_name], check=True, capture_output=True, text=True)
    return float(out.stdout)


def print_memory(name: str, shape_name: str) -> None:
    h, w, t = problem(*SHAPES[shape_name])
    WAYS[name](*problem(2, 8, 4)).backward()  # what the first call loads is not counted
    h.grad, w.grad = torch.zeros_like(h), torch.zeros_like(w)
    h.grad.fill_(0), w.grad.fill_(0)
    before = resident("VmRSS")
    WAYS[name](h, w, t).backward()
    print(resident("VmHWM") - before)


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most. (`ru_maxrss` would count the parent's as well.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def errors() -> dict[str, float]:
    h, w, t = problem(64, 4096, 64)
    exact = w.detach().double().requires_grad_()
    cross_entropy(linear(h.detach().double(), exact), t, reduction="sum").backward()
    found = {}
    for name, way in WAYS.items():
        w.grad = None
        way(h, w, t).backward()
        found[name] = ((w.grad - exact.grad).norm() / exact.grad.norm()).item()
    return found


def main() -> int:
    torch.set_num_threads(1)
    error, missed = errors(), False
    for shape_name, shape in SHAPES.items():
        rows, vocabulary, hidden = shape
        print(f"{shape_name}: {rows} rows, {vocabulary} tokens, hidden {hidden}")
        ms = times(shape)
        mib = {name: memory(name, shape_name) for name in WAYS}
        for name in WAYS:
            shown = "     -" if name == "engines, with entropy" else f"{error[name]:6.0e}"
            print(f"  {name:30} {statistics.median(ms[name]):7.0f} ms  {mib[name]:6.0f} MiB  {shown}")
        ratio = statistics.median(ours / plain for ours, plain in zip(ms[OURS], ms[PLAIN], strict=True))
        print(f"  {OURS} / plain: {ratio:.3f} of the time, {mib[OURS] / mib[PLAIN]:.2f} of the memory")
        missed |= ratio > MOST_TIME
        missed |= vocabulary > 100_000 and mib[OURS] > MOST_MEMORY * mib[PLAIN]
    print(
        f"wanted of engines with equal weights: at most {MOST_TIME} of the plain time and {MOST_MEMORY} of its "
        f"memory with 150k tokens: {'missed' if missed else 'met'}"
    )
    return int(missed)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        torch.set_num_threads(1)
        print_memory(*sys.argv[1:])
        sys.exit(0)
    sys.exit(main())
