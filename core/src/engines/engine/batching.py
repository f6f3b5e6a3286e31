"""From a replica's batch to the micro-batches of one pass, agreed among data-parallel ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.config import EngineConfig
from engines.contract import MicroBatchRules, Ranks
from engines.engine.collectives import gather_rows, raise_together
from engines.errors import BatchError, EnginesError
from engines.losses import Loss
from engines.microbatch import MicroBatchPlan, agreed_count, plan_micro_batches


@dataclass(frozen=True)
class Pass:
    """One pass over a batch: what every data-parallel rank agreed on before the first forward."""

    plan: MicroBatchPlan
    micro_batches: list[Batch]
    denominators: dict[str, float]
    """Each loss term's denominator over all data-parallel ranks."""
    tokens: int
    """Tokens over all data-parallel ranks."""
    targets: int
    """Target tokens over all data-parallel ranks."""


def prepare_pass(
    batch: Batch,
    loss: Loss | None,
    config: EngineConfig,
    rules: MicroBatchRules,
    ranks: Ranks,
    vocab_size: int | None,
) -> Pass:
    """Plan micro-batches, agree on their number, reduce denominators: one collective over data-parallel ranks.

    `vocab_size`: the model's, if it is known. Raises `BatchError` on all of them alike if the batch of any is not fit
    for the model, the loss or the limits.
    """
    plan, sums, error = None, {}, None
    names = sorted(loss.coefficients) if loss is not None else []
    try:
        _check_tokens(batch, vocab_size)
        if loss is not None:
            _check_fields(batch, loss)
            sums = _denominators(batch, loss)
        plan = _plan(batch, config, rules)
    except EnginesError as found:
        error = str(found)
    targets = int(batch["loss_mask"].sum()) if "loss_mask" in batch else 0
    row = [float(len(plan.parts) if plan else 0), float(error is not None), batch.num_tokens, targets]
    rows = gather_rows([*row, *(sums.get(name, 0.0) for name in names)], ranks.dp_group)
    raise_together(error, bool(rows[:, 1].any()), ranks.dp_group)
    assert plan is not None, "a rank without a plan has raised"
    count = agreed_count([int(value) for value in rows[:, 0]], rules)
    if count > len(plan.parts):
        plan = _plan(batch, config, rules, count)
    totals = rows.sum(0).tolist()
    return Pass(
        plan,
        [batch.select(part) if part else Batch.filler(batch) for part in plan.parts],
        dict(zip(names, totals[4:], strict=True)),
        int(totals[2]),
        int(totals[3]),
    )


def _plan(batch: Batch, config: EngineConfig, rules: MicroBatchRules, count: int | None = None) -> MicroBatchPlan:
    return plan_micro_batches(
        batch.lengths,
        rules=rules,
        samples_per_micro_batch=config.micro_batch_size,
        max_rows=config.max_tokens_per_micro_batch,
        count=count,
        groups=batch.groups,
    )


def _check_tokens(batch: Batch, vocab_size: int | None) -> None:
    ids = batch["input_ids"]
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
        raise BatchError(f"input_ids must be int64 [total_tokens], got {ids.dtype} {tuple(ids.shape)}")
    if vocab_size is None or not len(ids):
        return
    lowest, highest = (int(value) for value in ids.aminmax())
    if lowest < 0 or highest >= vocab_size:
        index = int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
        sequence = int((batch.cu_seqlens <= index).sum()) - 1
        raise BatchError(
            f"sequence {sequence} holds token id {int(ids[index])}, outside the model's vocabulary of {vocab_size}",
            "Were they made with this model's tokenizer?",
        )


def _check_fields(batch: Batch, loss: Loss) -> None:
    for name in sorted(loss.fields):
        _ = batch[name]


def _denominators(batch: Batch, loss: Loss) -> dict[str, float]:
    sums = {name: float(value) for name, value in loss.denominators(batch).items()}
    if set(sums) != set(loss.coefficients):
        raise BatchError(
            f"{type(loss).__name__}.denominators returned {sorted(sums)}, but the loss declares coefficients for "
            f"{sorted(loss.coefficients)}"
        )
    return sums


def restore_outputs(outputs: Sequence[TokenOutputs], done: Pass) -> TokenOutputs:
    """Per-token outputs of the micro-batches, in the order of the batch; fillers' are dropped."""
    names = list(outputs[0].present())
    return TokenOutputs(**{name: _restore([getattr(o, name) for o in outputs], name, done) for name in names})


def _restore(values: Sequence[Tensor], name: str, done: Pass) -> Tensor:
    pieces = []
    for value, micro_batch in zip(values, done.micro_batches, strict=True):
        sizes = [1] * len(micro_batch) if name == "last_values" else micro_batch.lengths
        pieces.append(list(value.split(sizes)))
    ordered = done.plan.restore(pieces)
    return torch.cat(ordered) if ordered else values[0][:0]
