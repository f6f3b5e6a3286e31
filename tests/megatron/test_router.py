"""The load-balancing loss alone, in bare mixture-of-experts layers at many layouts, against one written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.testing.world import World

HIDDEN, EXPERTS, TOP_K = 8, 4, 2
COEFFICIENT = 0.3
ROWS = [16, 8, 24]
"""Of each micro-batch, padding included."""


@dataclass(frozen=True)
class Case:
    """A layout; `tensor` ranks with sequence parallelism."""

    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        return self.data * self.context * self.tensor


CASES = {
    "single": Case(),
    "dp2": Case(data=2),
    "cp2": Case(context=2),
    "tp2": Case(tensor=2),
    "dp2 ep2": Case(data=2, expert=2),
    "dp2 cp2": Case(data=2, context=2),
    "tp2 cp2": Case(tensor=2, context=2),
    "dp2 tp2 ep2": Case(data=2, tensor=2, expert=2),
}


@dataclass(frozen=True)
class Data:
    weight: Tensor
    """Of the router, `[experts, hidden]`."""
    hidden: list[Tensor]
    """Of each micro-batch, `[rows, hidden]`."""
    real: list[Tensor]
    """bool `[rows]`."""


def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        weight=torch.randn(EXPERTS, HIDDEN, generator=generator),
        hidden=[torch.randn(rows, HIDDEN, generator=generator) for rows in ROWS],
        real=[torch.rand(rows, generator=generator) > 0.3 for rows in ROWS],
    )


def expected(data: Data) -> tuple[list[list[Tensor]], Tensor, list[Tensor]]:
    """Each micro-batch's load-balancing loss, z-loss and tokens per expert; and the gradients of coefficient times
    the mean loss, in the router's weight and in hidden states."""
    leaves = [leaf.double().requires_grad_() for leaf in (data.weight, *data.hidden)]
    weight, hidden = leaves[0], leaves[1:]
    records, losses = [], []
    for states, real in zip(hidden, data.real, strict=True):
        logits = (states @ weight.T)[real]
        tokens = torch.zeros(EXPERTS, dtype=torch.float64)
        for row in logits.topk(TOP_K).indices.tolist():
            tokens[row] += 1
        losses.append(EXPERTS * (tokens / (len(logits) * TOP_K) * logits.softmax(-1).mean(0)).sum())
        z = logits.exp().sum(-1).log().square().mean()
        records.append([losses[-1].detach(), z.detach(), tokens])
    grads = torch.autograd.grad(COEFFICIENT * sum(losses) / len(losses), leaves)
    return records, grads[0], list(grads[1:])


@contextmanager
def mixture(case: Case, weight: Tensor) -> Iterator[Any]:
    """Within Megatron's groups for `case`, a layer whose router has this weight."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from engines_megatron import groups
    from engines_megatron.layout import Layout
    from engines_megatron.model.router import Router

    layout = Layout(case.tensor, case.tensor > 1, 1, 1, case.context, case.expert, 1, case.data, (1,), 8)
    groups.acquire(layout)
    try:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            ffn_hidden_size=HIDDEN,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_token_dispatcher_type="alltoall",
            tensor_model_parallel_size=case.tensor,
            sequence_parallel=case.tensor > 1,
            context_parallel_size=case.context,
            expert_model_parallel_size=case.expert,
            expert_tensor_parallel_size=1,
            add_bias_linear=False,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
        spec.submodules.router = Router
        layer: Any = build_module(spec, config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        layer.set_layer_number(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(0.01)
            layer.router.weight.copy_(weight)
        yield layer
    finally:
        groups.release()


def run(case: Case, data: Data, recompute: bool, coefficient: float) -> dict[str, Any]:
    """On each rank: the records of its micro-batches, the router's gradient reduced as an engine has it reduced, and
    by micro-batch the places of the rank's rows and their gradients."""
    import torch.distributed as dist

    from engines_megatron.runtime.cpu import install

    install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import checkpoint

    from engines_megatron.model.router import auxiliary_scale

    records, rows = {}, {}
    averaged = case.data * case.context
    with mixture(case, data.weight) as layer:
        router = layer.router
        assert router.weight.sequence_parallel is (case.tensor > 1)
        router.auxiliary_scale = auxiliary_scale(coefficient, len(ROWS), case.data, case.context)
        shard = parallel_state.get_context_parallel_rank() * case.tensor
        shard += parallel_state.get_tensor_model_parallel_rank()
        for start in range(0, len(ROWS), case.data):
            index = start + parallel_state.get_data_parallel_rank()
            is_filler = index >= len(ROWS)
            taken = 0 if is_filler else index
            places = torch.arange(ROWS[taken]).chunk(case.context * case.tensor)[shard]
            states = data.hidden[taken][places, None].requires_grad_()
            padding = ~data.real[taken][None, places] | is_filler

            def forward(states: Tensor, padding: Tensor = padding) -> Tensor:
                return layer(states, padding_mask=padding)[0]

            router.recording = not is_filler
            out = checkpoint(forward, False, states) if recompute else forward(states)
            router.recording = False
            if not is_filler:
                record = router.take()
                records[index] = [record.load_balancing_loss, record.z_loss, record.tokens_per_expert]
            (out * 0).sum().backward()
            assert router._record is None, "a recomputed layer left a record"
            if is_filler:
                assert (states.grad == 0).all()
            else:
                rows[index] = places, states.grad[:, 0] / averaged
        grad = router.weight.grad.clone()
    dist.all_reduce(grad)  # over data and context ranks, and over those of sequence parallelism
    return {"records": records, "router": grad / averaged, "rows": rows}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_loss_alone_is_equal_at_every_layout(world: Callable[[int], World], case: Case, recompute: bool) -> None:
    whole = data()
    records, router, hidden = expected(whole)
    found = [torch.zeros(rows, HIDDEN) for rows in ROWS]
    for answer in world(case.size)(run, case, whole, recompute, COEFFICIENT):
        torch.testing.assert_close(answer["router"].double(), router, rtol=1e-5, atol=1e-7)
        for index, record in answer["records"].items():
            for ours, theirs in zip(record, records[index], strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)
        for index, (places, grad) in answer["rows"].items():
            found[index][places] += grad
    for ours, theirs in zip(found, hidden, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


def test_without_a_coefficient_it_is_a_metric_alone(world: Callable[[int], World]) -> None:
    whole = data()
    (answer,) = world(1)(run, Case(), whole, False, 0.0)
    for index, (loss, *_) in enumerate(expected(whole)[0]):
        torch.testing.assert_close(answer["records"][index][0].double(), loss, rtol=1e-5, atol=0)
    assert (answer["router"] == 0).all()
