"""bfloat16 over float32 parameters, recomputed activations, and runs that repeat to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.contract import hookimpl
from engines.losses import SFTLoss
from engines.testing.runs import pack, same_bits
from engines.testing.samples import mini_batches
from engines.testing.world import World
from engines.worker import TrainingWorker
from support.bfloat16 import distance, reference_step
from support.engine import OPTIMIZER, share, train_step, weights
from support.megatron import LAYOUTS, settings
from support.megatron_engine import Chunks, gradients, masters, megatron

Worlds = Callable[[int], World]
Deep = Callable[..., Path]

FIRST, SECOND, THIRD = mini_batches()
ONE_EACH = {"micro_batch_size": 1}
BFLOAT16 = {"dtype": "bfloat16"}


def dtypes(folder: Path, layout: str) -> dict[str, set[torch.dtype]]:
    with megatron(folder, layout, **BFLOAT16, wrappers=[chunks := Chunks()]) as engine:
        train_step(engine, FIRST)
        states = list(engine._base._optimizer.states())
        return {
            "parameters": {p.dtype for _, p in chunks.parameters()},
            "gradients": {p.main_grad.dtype for _, p in chunks.parameters()},
            "main parameters": {state.main.dtype for state in states},
            "moments": {moment.dtype for state in states for moment in state.moments.values()},
            "export": {tensor.dtype for tensor in weights(engine).values()},
        }


@pytest.mark.parametrize("layout", ["tp2 sp", pytest.param("pp2 dp2 distributed", marks=pytest.mark.more)])
def test_what_is_bfloat16_and_what_float32(layout: str, world: Worlds, deep: Deep) -> None:
    for found in world(LAYOUTS[layout].processes)(dtypes, deep("qwen3_moe"), layout):
        assert found.pop("parameters") == found.pop("export") == {torch.bfloat16}
        assert set.union(*found.values()) == {torch.float32}


def step_in_bfloat16(folder: Path, layout: str) -> tuple[float, dict[str, Tensor]]:
    with megatron(folder, layout, ONE_EACH, **BFLOAT16, wrappers=[chunks := Chunks()]) as engine:
        loss = engine.forward_backward(share(engine, FIRST), SFTLoss())["loss"]
        return loss, gradients(engine, chunks)


@pytest.mark.parametrize("layout", ["single", "tp2 sp", pytest.param("pp2 vpp2", marks=pytest.mark.more)])
def test_is_as_close_to_float32_as_plain_bfloat16(layout: str, world: Worlds, deep: Deep) -> None:
    loss, plain = reference_step(deep("llama"), torch.bfloat16)
    exact_loss, exact = reference_step(deep("llama"), torch.float32)
    for found_loss, found in world(LAYOUTS[layout].processes)(step_in_bfloat16, deep("llama"), layout):
        assert found_loss == pytest.approx(loss, rel=2e-3)
        assert found_loss == pytest.approx(exact_loss, rel=2e-3)
        assert 0.5 < distance(found, exact) / distance(plain, exact) < 1.5


SMALL = {"lr": 1e-5, "eps": 1e-4, "clip_grad": None}


def twenty_steps(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    with megatron(folder, "single", ONE_EACH, **BFLOAT16, optimizer=SMALL) as engine:
        before = {name: tensor.clone() for name, tensor in masters(engine).items()}
        for _ in range(20):
            train_step(engine, FIRST[:3])
        return before, masters(engine), weights(engine)


def reference_steps(folder: Path) -> dict[str, Tensor]:
    """float32 parameters, copied to a bfloat16 model for each step."""
    from transformers import AutoModelForCausalLM

    from engines.testing.plain import sum_of_cross_entropies
    from support.bfloat16 import FloatLogits

    main = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").bfloat16().float()
    optimizer = torch.optim.AdamW(main.parameters(), lr=SMALL["lr"], eps=SMALL["eps"], weight_decay=0.0)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").bfloat16()
    targets = sum(sample.num_targets for sample in FIRST[:3])
    for _ in range(20):
        with torch.no_grad():
            for low, high in zip(model.parameters(), main.parameters(), strict=True):
                low.copy_(high)
                high.grad = torch.zeros_like(high)
        for sample in FIRST[:3]:
            (sum_of_cross_entropies(FloatLogits(model), sample) / targets).backward()
            for low, high in zip(model.parameters(), main.parameters(), strict=True):
                high.grad += low.grad.float()
                low.grad = None
        optimizer.step()
    return {name: parameter.detach() for name, parameter in main.named_parameters()}


@pytest.mark.more
def test_small_updates_are_kept(world: Worlds, deep: Deep) -> None:
    """Movements of 2e-4 at most: beside weights near 1, bfloat16 has no place for them."""
    folder = deep("llama")
    expected = reference_steps(folder)
    ((before, after, exported),) = world(1)(twenty_steps, folder)
    moved = {name: after[name] - before[name] for name in after}
    truth = {name: expected[name] - before[name] for name in after}
    assert distance(moved, truth) < 0.1
    norm = "model.norm.weight"
    assert moved[norm].abs().min() > 0
    assert torch.equal(exported[norm].float(), before[norm])
    assert all(torch.equal(exported[name], after[name].bfloat16()) for name in after)


def train(folder: Path, layout: str, engine_settings: dict[str, Any], dtype: str) -> tuple[Any, Any, dict[str, int]]:
    """Loss and norm of each step, weights, and how often parts of a layer ran for a micro-batch."""
    with megatron(folder, layout, engine_settings, dtype=dtype, wrappers=[counter := Counter()]) as engine:
        steps = [train_step(engine, samples) for samples in (FIRST, SECOND)]
        counts = {part: counter.take(part) for part in ("layer", "attention")}
        engine.infer_batch(share(engine, FIRST))
        counts |= {f"inferring {part}": counter.take(part) for part in ("layer", "attention")}
        return steps, weights(engine), counts


class Counter:
    """Runs of layers and of their core attention, and how many there are without recomputing."""

    def __init__(self) -> None:
        self.runs = {"layer": 0, "attention": 0}
        self.plain = {"layer": 0, "attention": 0}
        self.seen: set[int] = set()

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Any) -> Iterator[None]:
        for layer in chunk.decoder.layers:
            for part, module in (("layer", layer), ("attention", layer.self_attention.core_attention)):
                self.plain[part] += 1
                if id(module) not in self.seen:
                    self.seen.add(id(module))
                    module.register_forward_pre_hook(lambda *_, part=part: self._count(part))
        return (yield)

    def _count(self, part: str) -> None:
        self.runs[part] += 1

    def take(self, part: str) -> float:
        ratio = self.runs[part] / self.plain[part]
        self.runs[part] = self.plain[part] = 0
        return ratio


FULL = {"activation_checkpointing": True}
SELECTIVE = {"activation_checkpointing": True, "recompute": "selective"}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_moe", "tp2 sp", marks=pytest.mark.more),
        ("llama_tied", "pp2 vpp2"),
        ("qwen3_moe", "ep2"),
        pytest.param("qwen3", "cp2", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "pp2 ep2", marks=pytest.mark.more),
    ],
)
def test_recomputing_changes_nothing(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    """To the bit: the same kernels run on the same numbers again."""
    run, folder = world(LAYOUTS[layout].processes), deep(family)
    how = {"micro_batch_size": 2, **({"moe_aux_loss_coefficient": 0.1} if "moe" in family else {})}
    answers = {
        name: run(train, folder, layout, {**how, **recompute}, "float32")
        for name, recompute in {"none": {}, "selective": SELECTIVE, "full": FULL}.items()
    }
    expected = {"none": (1, 1), "selective": (1, 2), "full": (2, 2)}
    for name, (layers, attention) in expected.items():
        for (steps, after, counts), (plain_steps, plain_after, _) in zip(answers[name], answers["none"], strict=True):
            assert (counts["layer"], counts["attention"]) == (layers, attention)
            assert (counts["inferring layer"], counts["inferring attention"]) == (1, 1)
            assert steps == plain_steps and same_bits(after, plain_after), name


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_moe", "bfloat16"), pytest.param("llama_tied", "float32", marks=pytest.mark.more)]
)
def test_the_distributed_optimizer_equals_the_plain_one(family: str, dtype: str, world: Worlds, deep: Deep) -> None:
    run, folder = world(2), deep(family)
    plain = run(train, folder, "dp2", ONE_EACH, dtype)
    distributed = run(train, folder, "dp2", {**ONE_EACH, "distributed_optimizer": True}, dtype)
    for (steps, after, _), (plain_steps, plain_after, _) in zip(distributed, plain, strict=True):
        for found, expected in zip(steps, plain_steps, strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
        for name, tensor in plain_after.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-7)


def train_deterministically(folder: Path, layout: str, engine_settings: dict[str, Any]) -> tuple[Any, Any]:
    """In a world that others use afterwards."""
    how = settings(layout, **engine_settings)
    try:
        with TrainingWorker({"path": str(folder)}, how, OPTIMIZER, deterministic=True) as worker:
            worker.initialize()
            assert torch.are_deterministic_algorithms_enabled()
            steps = [worker.train_mini_batch(pack(samples), SFTLoss()) for samples in (FIRST, SECOND, THIRD)]
            return steps, weights(worker.engine)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("family", "layout", "engine_settings"),
    [
        ("qwen3_moe", "tp2 sp", {"moe_aux_loss_coefficient": 0.1}),
        pytest.param("llama_tied", "pp2 dp2 distributed", {}, marks=pytest.mark.more),
        pytest.param("qwen3_moe", "ep2", {}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_deterministic_runs_repeat_to_the_bit(
    family: str, layout: str, engine_settings: dict[str, Any], world: Worlds, deep: Deep
) -> None:
    run, folder = world(LAYOUTS[layout].processes), deep(family)
    first, again = (run(train_deterministically, folder, layout, engine_settings) for _ in range(2))
    for (steps, after), (steps_again, after_again) in zip(first, again, strict=True):
        assert steps == steps_again and same_bits(after, after_again)
