"""Why a step can't be done whose gradients are not finite: which samples, which parameters, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from engines.batch import Batch
from engines.worker import TrainingWorker

_SHOWN: Final = 8
"""Names of a list that are shown."""


def finite_samples(worker: TrainingWorker, batch: Batch) -> list[bool]:
    """For each sample of `batch`, whether all its log-probabilities are finite under the weights as they are.

    One more forward. Every rank calls it with the same batch, and gets the same answer.
    """
    outputs = worker.infer_batch(batch, needs=("log_probs",)).outputs
    assert outputs is not None and outputs.log_probs is not None, "a worker gives every rank all outputs"
    each = torch.split(outputs.log_probs, batch.lengths)
    return [bool(torch.isfinite(log_probs).all()) for log_probs in each]


def diagnose(samples: Mapping[str, bool], parameters: Sequence[str]) -> str:
    """What to say about a skipped step.

    `samples`: by place in the data, whether its log-probabilities are finite. `parameters`: those whose gradients
    are not.
    """
    bad = [place for place, finite in samples.items() if not finite]
    if not bad:
        lines = [
            "The loss of each of its samples is finite, so gradients overflow: lower optimizer.lr, set"
            " optimizer.clip_grad, add optimizer.warmup_steps, or leave low precision (model.dtype). Its samples:",
            *_shown(list(samples)),
        ]
    elif len(bad) == len(samples):
        lines = [
            "No sample of that step has a finite loss, so the weights are at fault, not the data: lower optimizer.lr,"
            " add optimizer.warmup_steps, or go on from an earlier checkpoint. Its samples:",
            *_shown(bad),
        ]
    else:
        lines = [
            f"The loss is not finite for {len(bad)} of the {len(samples)} samples of that step, so look at these"
            " first, and at the weights of tokens that only they have:",
            *_shown(bad),
        ]
    if parameters:
        lines += [f"Gradients that are not finite, of {len(parameters)} parameters:", *_shown(parameters)]
    return "\n".join(lines)


def _shown(names: Sequence[str]) -> list[str]:
    more = [f"  and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [*(f"  {name}" for name in names[:_SHOWN]), *more]
