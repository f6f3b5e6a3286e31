"""Micro-batches through Megatron's own schedule, with the contract's gradients.

The gradient of a parameter must be the plain sum of d(S/D) over micro-batches, data-parallel ranks and token shards.
Megatron multiplies a loss given as a pair by the context-parallel size and divides it by the number of
micro-batches; its data-parallel reduction then averages over data times context ranks. So the loss is given times
(number of micro-batches * data-parallel size). The other mode, `calculate_per_token_loss`, is never used: it
scales the routers' auxiliary losses by counts of tokens, and halves them under context and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, MicroResult
from engines_megatron.layout import Layout
from engines_megatron.rows import Rows

Forward = Callable[[int, int], tuple[Tensor, TokenOutputs | None]]
"""From a chunk's and a micro-batch's number to hidden states, and to outputs on a last stage."""


def run_schedule(
    modules: Sequence[Any],
    forward: Forward,
    micro_batches: Sequence[Batch],
    rows: Sequence[Rows],
    loss: BoundLoss | None,
    needs: frozenset[str],
    *,
    layout: Layout,
    forward_only: bool,
) -> list[MicroResult]:
    """Run all micro-batches through this rank's chunks; returns their results on a last stage, else nothing.

    `modules`: the chunks as Megatron's schedule takes them, in order of depth. `rows`: of each micro-batch.
    """
    count = len(micro_batches)
    numbers = {id(module): number for number, module in enumerate(modules)}

    def step(indices: Iterator[int], module: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, MicroResult]]]:
        index = next(indices)
        hidden, outputs = forward(numbers[id(module)], index)

        def measure(_: Tensor) -> tuple[Tensor, MicroResult]:
            assert outputs is not None, "Megatron asks for a loss on last stages alone"
            if loss is None:
                return hidden.new_zeros(()), MicroResult({}, outputs.keep(needs) if needs else None)
            value, record = loss(outputs, micro_batches[index])
            return value * (count * layout.data), record

        return hidden, measure

    results: list[MicroResult] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(count)) for _ in modules] if len(modules) > 1 else iter(range(count)),
        model=list(modules) if len(modules) > 1 else modules[0],
        num_microbatches=count,
        seq_length=max(one.input_ids.shape[1] for one in rows) * layout.context,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results
