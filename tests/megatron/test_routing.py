"""Auxiliary losses and gradients of whole mixtures of experts, at every layout, against transformers' autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.samples import mini_batches
from engines.testing.world import World
from support.engine import share
from support.megatron import LAYERS, LAYOUTS
from support.megatron_engine import Chunks, gradients, megatron

Worlds = Callable[[int], World]
Deep = Callable[..., Path]

COEFFICIENT = 0.5
EXPERTS, TOP_K = 8, 2
SAMPLES = mini_batches()[0][:7]
"""One a micro-batch: the same plan at every layout, with fillers where replicas or chunks want an even number."""
ONE_EACH = {"micro_batch_size": 1}
LOUD = {"router_aux_loss_coef": 7.0, "output_router_logits": True}
"""In the model's config.json, where nobody asked for it."""


class Nothing(SFTLoss):
    """A loss without any gradient of its own."""

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        return {name: 0 * value for name, value in super().__call__(out, batch).items()}


def measure(folder: Path, layout: str, more: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the auxiliary loss alone, and of cross entropy without one; both with their metrics."""
    how = {**ONE_EACH, **more}
    alone, main = Chunks(), Chunks()
    with (
        megatron(folder, layout, {**how, "moe_aux_loss_coefficient": COEFFICIENT}, wrappers=[alone]) as balancing,
        megatron(folder, layout, how, wrappers=[main]) as engine,
    ):
        answer: dict[str, Any] = {
            "metrics": [
                balancing.forward_backward(share(balancing, SAMPLES), Nothing()),
                engine.forward_backward(share(engine, SAMPLES), SFTLoss()),
                engine.infer_batch(share(engine, SAMPLES), needs=(), loss=SFTLoss()).metrics,
            ],
            "auxiliary": gradients(balancing, alone),
            "main": gradients(engine, main),
        }
    return answer if torch.distributed.get_rank() == 0 else {"metrics": answer["metrics"]}


@cache
def expected(folder: Path) -> dict[str, Any]:
    """The same, sample by sample, from the hidden states that transformers' routers are given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    states: list[Tensor] = []
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, args: states.append(args[0].reshape(-1, args[0].shape[-1])))
    targets = sum(sample.num_targets for sample in SAMPLES)
    balancing = z = main = torch.zeros(())
    tokens, busiest = torch.zeros(EXPERTS), 0.0
    for sample in SAMPLES:
        states.clear()
        main = main + plain.sum_of_cross_entropies(model, sample) / targets
        counts = torch.zeros(len(gates), EXPERTS)
        for layer, (gate, rows) in enumerate(zip(gates, states, strict=True)):
            logits = rows @ gate.weight.T
            for chosen in logits.topk(TOP_K).indices.tolist():
                counts[layer, chosen] += 1
            fractions = counts[layer] / (len(rows) * TOP_K)
            balancing = balancing + EXPERTS * (fractions * logits.softmax(-1).mean(0)).sum() / len(SAMPLES)
            z = z + logits.exp().sum(-1).log().square().mean() / len(SAMPLES)
        tokens += counts.sum(0) / len(SAMPLES)
        busiest += max((row.max() / row.mean()).item() for row in counts) / len(SAMPLES)
    metrics = {f"moe/tokens_per_expert/{expert}": float(count) for expert, count in enumerate(tokens)}
    metrics |= {"moe/load_balancing_loss": balancing.item(), "moe/z_loss": z.item(), "moe/busiest_expert": busiest}
    return {
        "auxiliary": gradients_of(model, COEFFICIENT * balancing),
        "main": gradients_of(model, main),
        "metrics": metrics,
        "mixtures": len(gates),
        "loss": main.item(),
    }


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """By the names that `save_pretrained` writes, 0 where the loss doesn't depend on a parameter."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    held = [parameter.data for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    named = plain.saved_weights(model)
    for parameter, weight in zip(parameters, held, strict=True):
        parameter.data = weight
    return named


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Gradients that differ, with their largest difference over the largest value of all gradients of their kind."""
    assert found.keys() == truth.keys()
    kinds: dict[str, float] = {}
    for name, value in truth.items():
        kind = name.rsplit(".", 2)[-2]
        kinds[kind] = max(kinds.get(kind, 0.0), value.abs().max().item())
    off = {}
    for name, value in truth.items():
        difference = (found[name] - value).abs().max().item()
        scale = kinds[name.rsplit(".", 2)[-2]]
        off[name] = difference / scale if scale else difference
    return {name: value for name, value in off.items() if not value < 2e-5}


RECOMPUTE = {"activation_checkpointing": True}
CASES: list[tuple[str, str, dict[str, Any], bool]] = [
    ("qwen3_moe", "single", {}, False),
    ("qwen3_moe", "dp2", {}, False),
    ("qwen3_moe", "cp2", {}, False),
    ("qwen3_moe", "tp2 sp", {}, True),
    ("qwen3_moe", "ep2", {}, False),
    ("qwen3_moe_dense_first", "pp2", {}, False),
    ("qwen3_moe_dense_first", "pp2 vpp2", RECOMPUTE, False),
    ("mixtral", "tp2 sp", RECOMPUTE, True),
    ("qwen3_moe", "tp2 cp2", {}, True),
    ("qwen3_moe", "tp2 pp2", RECOMPUTE, True),
    ("qwen3_moe", "pp4 uneven", {}, True),
    ("qwen3_moe_dense_first", "pp2 ep2", {}, True),
    ("mixtral", "tp2 ep2", {}, True),
    ("mixtral", "tp2 etp2", RECOMPUTE, True),
    ("qwen3_moe", "ep2", {**RECOMPUTE, "recompute": "selective"}, True),
]


@pytest.mark.parametrize(
    ("family", "layout", "more"),
    [
        pytest.param(
            *(family, layout, more),
            marks=pytest.mark.more if rare else (),
            id=f"{family}, {layout}, {more.get('recompute', 'recompute')}" if more else f"{family}, {layout}",
        )
        for family, layout, more, rare in CASES
    ],
)
def test_gradients_and_metrics(family: str, layout: str, more: dict[str, Any], world: Worlds, deep: Deep) -> None:
    folder = deep(family, **LOUD)
    answers = world(LAYOUTS[layout].processes)(measure, folder, layout, more)
    truth = expected(folder)
    assert truth["mixtures"] == (LAYERS - 3 if "dense_first" in family else LAYERS)
    assert not far(answers[0]["auxiliary"], truth["auxiliary"]), "of the auxiliary loss"
    assert not far(answers[0]["main"], truth["main"]), "of cross entropy"
    for answer in answers:
        assert answer["metrics"] == answers[0]["metrics"], "ranks disagree"
        for metrics in answer["metrics"]:
            found = {name: value for name, value in metrics.items() if name.startswith("moe/")}
            assert found == pytest.approx(truth["metrics"], rel=1e-5)
            rows = sum(value for name, value in found.items() if "tokens_per_expert" in name) * len(SAMPLES)
            assert rows == pytest.approx(metrics["tokens"] * TOP_K * truth["mixtures"])
        assert answer["metrics"][0]["loss"] == 0
        assert answer["metrics"][1]["loss"] == pytest.approx(truth["loss"], rel=5e-6)


def main_gradients(folder: Path, layout: str) -> tuple[float, dict[str, Tensor]]:
    with megatron(folder, layout, ONE_EACH, wrappers=[chunks := Chunks()]) as engine:
        metrics = engine.forward_backward(share(engine, SAMPLES), SFTLoss())
        assert not any(name.startswith("moe/") for name in metrics)
        return metrics["loss"], gradients(engine, chunks)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "tp2"),
        ("qwen3", "tp2 sp"),
        pytest.param("qwen3", "tp2 cp2", marks=pytest.mark.more),
        pytest.param("qwen3", "tp2 pp2", marks=pytest.mark.more),
        pytest.param("llama_tied", "pp2 vpp2", marks=pytest.mark.more),
        pytest.param("llama_tied", "tp2 pp2", marks=pytest.mark.more),
        pytest.param("qwen2", "tp2 sp", marks=pytest.mark.more),
    ],
)
def test_gradients_of_dense_models(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    """Norms of queries and keys among them, which every tensor-parallel rank holds whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deep(family), attn_implementation="eager")
    targets = sum(sample.num_targets for sample in SAMPLES)
    loss = sum((plain.sum_of_cross_entropies(model, one) for one in SAMPLES), torch.zeros(())) / targets
    truth = gradients_of(model, loss)
    for found_loss, found in world(LAYOUTS[layout].processes)(main_gradients, deep(family), layout):
        assert found_loss == pytest.approx(loss.item(), rel=5e-6)
        assert not far(found, truth)
