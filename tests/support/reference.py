"""The reference: a plain PyTorch and transformers loop in one process, each sample by itself.

It imports nothing of engines, packs nothing, pads nothing and shards nothing; formulas are written out as the
docs state them, so that it can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Sample:
    """One training sample: token i is a target if `loss_mask[i]` and i > 0."""

    input_ids: list[int]
    loss_mask: list[bool]

    @property
    def num_targets(self) -> int:
        """How many of its tokens count."""
        return sum(self.loss_mask[1:])


@dataclass
class Run:
    """What a training run leaves: one value a step, and the weights after the last."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """By the names, and in the shapes, that `save_pretrained` writes."""


def train(
    folder: Path,
    mini_batches: Sequence[Sequence[Sample]],
    *,
    lr: float,
    eps: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    clip_grad: float | None = 1.0,
    schedule: str = "constant",
    warmup_steps: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Run:
    """One AdamW step per mini-batch of samples that hold at least one target each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr, betas, eps, weight_decay, foreach=False, fused=False)
    run = Run()
    for step, samples in enumerate(mini_batches, start=1):
        optimizer.param_groups[0]["lr"] = rate(step, lr, warmup_steps, schedule, len(mini_batches))
        targets = sum(sample.num_targets for sample in samples)
        loss = 0.0
        for sample in samples:
            part = sum_of_cross_entropies(model, sample) / targets
            part.backward()
            loss += part.item()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))
        if clip_grad is not None:
            for parameter in parameters:
                parameter.grad.mul_(min(1.0, clip_grad / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss)
        run.grad_norms.append(norm)
        run.lrs.append(optimizer.param_groups[0]["lr"])
    run.weights = saved_weights(model)
    return run


def sum_of_cross_entropies(model: Any, sample: Sample) -> Tensor:
    """-log p(token | tokens before it), summed over the sample's targets."""
    logits = model(torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1]
    targets = torch.tensor([-100, *sample.input_ids[1:]])
    targets[~torch.tensor(sample.loss_mask)] = -100
    return cross_entropy(logits, targets[1:], ignore_index=-100, reduction="sum")


def log_probs(model: Any, input_ids: list[int]) -> Tensor:
    """log p(token | tokens before it) of each token `[length]`; 0 for the first."""
    with torch.no_grad():
        scores = model(torch.tensor([input_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), scores.gather(1, torch.tensor(input_ids[1:])[:, None])[:, 0]])


def rate(step: int, lr: float, warmup_steps: int, schedule: str, total_steps: int) -> float:
    """The learning rate of a step, counted from 1."""
    if step <= warmup_steps:
        return lr * step / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return lr * factor[schedule]


def saved_weights(model: Any) -> dict[str, Tensor]:
    """The model's weights as a user would find them on disk."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
