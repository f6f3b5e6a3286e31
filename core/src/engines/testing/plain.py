"""The reference: a plain PyTorch and transformers loop in one process, each sample by itself.

It imports nothing of engines, packs nothing, pads nothing and shards nothing; formulas are written out as the
docs state them, so that it can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import cross_entropy

S = TypeVar("S", bound="Sample")


@dataclass(frozen=True)
class Sample:
    """One training sample: token i is a target if `loss_mask[i]` and i > 0."""

    input_ids: list[int]
    loss_mask: list[bool]

    @property
    def num_targets(self) -> int:
        """How many of its tokens count."""
        return sum(self.loss_mask[1:])


@dataclass(frozen=True)
class ValuedSample(Sample):
    """One whose targets and end have given values."""

    returns: list[float]
    """A value for each token, to be met where `loss_mask` is set."""
    reward: float
    """The value after the last token."""


@dataclass
class Run:
    """What a training run leaves: one value a step, and the weights after the last."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """By the names, and in the shapes, that `save_pretrained` writes."""


def train(
    folder: Path, mini_batches: Sequence[Sequence[Sample]], *, dtype: torch.dtype = torch.float32, **settings: Any
) -> Run:
    """Cross entropy of targets, of which each mini-batch holds one at least; `settings`: those of `descend`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).train()

    def parts(samples: Sequence[Sample]) -> Iterator[Tensor]:
        targets = sum(sample.num_targets for sample in samples)
        return (sum_of_cross_entropies(model, sample) / targets for sample in samples)

    run = descend(list(model.parameters()), mini_batches, parts, **settings)
    run.weights = saved_weights(model)
    return run


def descend(
    parameters: Sequence[Tensor],
    mini_batches: Sequence[Sequence[S]],
    parts: Callable[[Sequence[S]], Iterator[Tensor]],
    *,
    lr: float,
    eps: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    clip_grad: float | None = 1.0,
    schedule: str = "constant",
    warmup_steps: int = 0,
) -> Run:
    """One AdamW step per mini-batch, on the sum of its loss's `parts`."""
    optimizer = torch.optim.AdamW(parameters, lr, betas, eps, weight_decay, foreach=False, fused=False)
    run = Run()
    for step, samples in enumerate(mini_batches, start=1):
        optimizer.param_groups[0]["lr"] = rate(step, lr, warmup_steps, schedule, len(mini_batches))
        loss = 0.0
        for part in parts(samples):
            part.backward()
            loss += part.item()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if clip_grad is not None:
            for gradient in gradients:
                gradient.mul_(min(1.0, clip_grad / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss)
        run.grad_norms.append(norm)
        run.lrs.append(optimizer.param_groups[0]["lr"])
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


class ValueModel:
    """A transformers backbone with a linear head on its last hidden states."""

    def __init__(self, folder: Path, head: Tensor) -> None:
        """`folder`: of any model with that backbone; `head` `[1, H]`."""
        from transformers import AutoModel

        self.backbone = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).train()
        self.head = Linear(head.shape[1], 1, bias=False)
        self.head.load_state_dict({"weight": head})

    def after_each_token(self, input_ids: list[int]) -> Tensor:
        """What the sequence up to and with each token is worth `[length]`."""
        hidden = self.backbone(torch.tensor([input_ids]), use_cache=False).last_hidden_state[0]
        values: Tensor = self.head(hidden)
        return values[:, 0]

    def train(
        self,
        mini_batches: Sequence[Sequence[ValuedSample]],
        *,
        of_targets: float = 1.0,
        of_ends: float = 1.0,
        **settings: Any,
    ) -> Run:
        """Mean squared errors over targets, of what precedes them, and over ends, weighted by `of_targets` and
        `of_ends`; `settings`: those of `descend`.
        """

        def parts(samples: Sequence[ValuedSample]) -> Iterator[Tensor]:
            targets = sum(sample.num_targets for sample in samples)
            for sample in samples:
                found = self.after_each_token(sample.input_ids)
                counts = torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
                error = (found[:-1] - torch.tensor(sample.returns[1:]))[counts].square().sum()
                yield of_targets * error / targets + of_ends * (found[-1] - sample.reward) ** 2 / len(samples)

        run = descend([*self.backbone.parameters(), *self.head.parameters()], mini_batches, parts, **settings)
        backbone = {f"model.{name}": weight for name, weight in saved_weights(self.backbone).items()}
        run.weights = {**backbone, "score.weight": self.head.weight.detach()}
        return run


def entropies(model: Any, input_ids: list[int]) -> Tensor:
    """Entropy of the prediction of each token `[length]`; 0 for the first."""
    with torch.no_grad():
        scores = model(torch.tensor([input_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), -(scores.exp() * scores).sum(-1)])


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
        weights: dict[str, Tensor] = load_file(Path(folder) / "model.safetensors")
        return weights
