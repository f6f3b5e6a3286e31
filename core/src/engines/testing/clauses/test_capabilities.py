"""What else an engine can declare does what the word says."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engines.contract import hookimpl
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.explaining import moved
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import live_bytes
from engines.testing.numbers import Numbers, assert_near, numbers_of
from engines.testing.plain import Sample
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches
from engines.testing.saved import assert_equal_checkpoints
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

METRICS = 5e-6
"""Largest relative difference of loss and gradient norm, in float32."""
ENTROPY = 2e-5
"""Largest difference of a token's entropy."""


class Kept:
    """Counts what forward passes keep for their backward passes."""

    def __init__(self) -> None:
        self.bytes = 0

    @hookimpl(wrapper=True)
    def forward_micro_batch(self) -> Generator[None, Any, Any]:
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            return (yield)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        return tensor.detach()


def keep(folder: Path, settings: dict[str, Any]) -> tuple[Numbers, int]:
    kept = Kept()
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER, wrappers=[kept]) as worker:
        worker.initialize()
        return numbers_of(worker, mini_batches()), kept.bytes


@clause("engines.config:EngineConfig", needs=("activation_checkpointing",))
def test_recomputed_activations_change_no_number(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """With `engine.activation_checkpointing` a forward pass keeps less for the backward pass, which recomputes it;
    loss and gradient norm are the same.
    """
    folder = model(subject.family_at(some_layout))
    all_kept, recomputed = (
        on_ranks(some_layout, keep, folder, subject.settings(some_layout, activation_checkpointing=flag))
        for flag in (False, True)
    )
    for rank, ((expected, whole), (found, part)) in enumerate(zip(all_kept, recomputed, strict=True)):
        assert_near(found, expected, METRICS, f"with activation_checkpointing on rank {rank}")
        assert part < whole, (
            f"with activation_checkpointing rank {rank} keeps {part} bytes for the backward pass, without it {whole}"
        )


@cache
def plain_entropies(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return torch.cat([plain.entropies(model, sample.input_ids) for sample in mini_batches()[0]])


def infer(folder: Path, settings: dict[str, Any]) -> Tensor:
    with TrainingWorker({"path": str(folder)}, settings) as worker:
        worker.initialize()
        outputs = worker.infer_batch(pack(mini_batches()[0]), needs=("entropy",)).outputs
        assert outputs is not None and outputs.entropy is not None
        return outputs.entropy


@clause("engines.batch:TokenOutputs", needs=("entropy",))
def test_entropy_is_that_of_the_distribution_of_each_token(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """`entropy[i]` is that of the distribution from which token i is drawn, over the whole vocabulary, in the order
    of the batch on every rank; 0 for a sequence's first token.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=3)
    expected, lengths = plain_entropies(folder), pack(mini_batches()[0]).lengths
    for rank, found in enumerate(on_ranks(some_layout, infer, folder, settings)):
        off = (found - expected).abs()
        worst = int(off.argmax())
        assert off[worst] <= ENTROPY, (
            f"on rank {rank} entropy[{worst}] is {found[worst]:.6f} instead of {expected[worst]:.6f}; "
            f"{int((off > ENTROPY).sum())} of {len(expected)} tokens are off"
            f"{moved(found, expected, lengths, ENTROPY)}"
        )


def train_deterministically(folder: Path, settings: dict[str, Any], target: Path) -> Numbers:
    """In processes that others use afterwards."""
    try:
        with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER, deterministic=True) as worker:
            worker.initialize()
            numbers = numbers_of(worker, mini_batches())
            worker.save_checkpoint(target, step=len(numbers))
            return numbers
    finally:
        torch.use_deterministic_algorithms(False)


@clause("engines.determinism:full_determinism", needs=("deterministic",))
def test_deterministic_runs_repeat_to_the_bit(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """Two runs with `deterministic` and equal seeds have the same losses and gradient norms to the bit, and leave the
    same weights and optimizer state; every kernel that they need has such a way.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=3)
    targets = tmp_path / "once", tmp_path / "again"
    once, again = (on_ranks(some_layout, train_deterministically, folder, settings, target) for target in targets)
    for rank, (expected, found) in enumerate(zip(once, again, strict=True)):
        assert found == expected, f"on rank {rank} the second run has {found}, the first had {expected}"
    assert_equal_checkpoints(targets[1], targets[0])


COEFFICIENT = 0.5
BALANCE = "moe/load_balancing_loss"
ONE_EACH = [samples[:7] for samples in mini_batches(steps=2)]
"""A sample to a micro-batch: one plan at every layout, with fillers where replicas or stages want an even number."""


def balance(folder: Path, settings: dict[str, Any]) -> Numbers:
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        return numbers_of(worker, ONE_EACH, [BALANCE])


@cache
def plain_balance(folder: Path) -> plain.Run:
    """The same in plain PyTorch, from the hidden states that transformers' routers are given; losses are whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train()
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    states: list[Tensor] = []
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, args: states.append(args[0].flatten(0, -2)))

    def balancing(gate: Any, rows: Tensor) -> Tensor:
        """experts * sum over experts of (share of rows sent there) * (mean probability)."""
        logits = rows @ gate.weight.T
        chosen = logits.topk(model.config.num_experts_per_tok).indices
        shares = torch.bincount(chosen.flatten(), minlength=logits.shape[1]) / chosen.numel()
        loss: Tensor = logits.shape[1] * (shares * logits.softmax(-1).mean(0)).sum()
        return loss

    def parts(samples: Sequence[Sample]) -> Iterator[Tensor]:
        targets = sum(sample.num_targets for sample in samples)
        for sample in samples:
            states.clear()
            part = plain.sum_of_cross_entropies(model, sample) / targets
            layers = sum(balancing(gate, rows) for gate, rows in zip(gates, states, strict=True))
            yield part + COEFFICIENT * layers / len(samples)

    optimizer: dict[str, Any] = OPTIMIZER
    return plain.descend(list(model.parameters()), ONE_EACH, parts, **optimizer)


@clause("numbers.md#auxiliary-losses-of-routers", needs=("moe_aux_loss",))
def test_the_load_balancing_loss_enters_the_gradient(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """With `engine.moe_aux_loss_coefficient` the gradient is that of the loss plus coefficient times the routers'
    load-balancing loss, summed over layers and averaged over micro-batches, at every layout; `loss` is without it,
    and `moe/load_balancing_loss` tells it, also where the coefficient is 0.
    """
    assert subject.mixtures, f"{subject.name} builds none of the kit's mixtures of experts: {subject.refusals}"
    folder = model(subject.mixtures[0])
    expected = plain_balance(folder)
    wanted = [
        {"loss": loss, "grad_norm": norm} for loss, norm in zip(expected.losses, expected.grad_norms, strict=True)
    ]
    taking = [one for one in subject.layouts if subject.refuses(folder, one) is None]
    several = [one for one in taking if one.mixture or one.needs == {"data_parallel"}]
    for layout in (SINGLE, *several):
        settings = subject.settings(layout, micro_batch_size=1, moe_aux_loss_coefficient=COEFFICIENT)
        for rank, found in enumerate(on_ranks(layout, balance, folder, settings)):
            whole = [{**step, "loss": step["loss"] + COEFFICIENT * step[BALANCE]} for step in found]
            assert_near(whole, wanted, METRICS, f"(loss: with coefficient * {BALANCE}) at {layout} on rank {rank}")
    told = found[0][BALANCE]
    untouched = on_ranks(SINGLE, balance, folder, subject.settings(micro_batch_size=1))[0][0][BALANCE]
    assert abs(untouched - told) <= METRICS * told, (
        f"of the same weights {BALANCE} is {told} with a coefficient, and {untouched} without one"
    )


def hold(folder: Path, settings: dict[str, Any]) -> tuple[Numbers, int, int]:
    """Numbers, bytes of tensors after the steps, and how many parameters this rank holds."""
    before = live_bytes()
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        numbers = numbers_of(worker, mini_batches())
        return numbers, live_bytes() - before, worker.engine.describe()["parameters"]


@clause("manifest.md#capabilities", needs=("distributed_optimizer", "data_parallel"))
def test_optimizer_state_is_sharded(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """Each data-parallel rank holds its share of AdamW's two moments instead of all of them, and nothing beside: a
    copy of its share of the weights counts against it, views of them don't. Numbers are the same.
    """
    folder = model(subject.families[0])
    whole, sharded = (
        next(one for one in subject.layouts if one.needs == needs)
        for needs in ({"data_parallel"}, {"data_parallel", "distributed_optimizer"})
    )
    answers = [on_ranks(layout, hold, folder, subject.settings(layout)) for layout in (whole, sharded)]
    for rank, ((expected, all_bytes, parameters), (found, fewer_bytes, _)) in enumerate(zip(*answers, strict=True)):
        assert_near(found, expected, METRICS, f"at {sharded} on rank {rank}")
        saved, wanted = all_bytes - fewer_bytes, 4 * parameters
        assert saved >= 0.8 * wanted, (
            f"at {sharded} rank {rank} holds {saved} bytes less than at {whole}; half of two float32 moments of its "
            f"{parameters} parameters are {wanted}"
        )
