"""One step in low precision, in plain PyTorch, and how far gradients are apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.testing.plain import sum_of_cross_entropies
from engines.testing.samples import mini_batches


def reference_step(folder: Path, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """A copy of the float32 model in `dtype` per sample; their gradients are summed in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    samples = mini_batches()[0]
    targets = sum(sample.num_targets for sample in samples)
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    loss = 0.0
    for sample in samples:
        cast = copy.deepcopy(model).to(dtype)
        part = sum_of_cross_entropies(FloatLogits(cast), sample) / targets
        part.backward()
        loss += part.item()
        for name, parameter in cast.named_parameters():
            sums[name] += parameter.grad.float()
    return loss, sums


class FloatLogits:
    """The loss is computed in float32 from the model's logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        out.logits = out.logits.float()
        return out


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of all gradients as one vector, relative to the length of `b`."""
    apart = sum(float((a[name] - b[name]).double().square().sum()) for name in b)
    return (apart / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5
