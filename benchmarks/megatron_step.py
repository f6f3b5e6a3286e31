"""What a step of the Megatron engine costs through `TrainingWorker`, against a loop written by hand on Megatron-Core.

float32 on a CPU, one thread a process, at two layouts: one process, and two pipeline stages with four micro-batches.
The loop holds Megatron's own GPTModel, cross entropy, schedule, gradient buffers and optimizer, of the same layout
and with the same weights; of the engine's modules only the core attention and the norm stand in its layer spec, since
Megatron's local attention takes no packed sequences. Its micro-batches are made beforehand; what the engine does to
make its own counts. All tokens but each sequence's first are targets, so that both heads see the same rows. Compared
are CPU times of steps on the same batches, over all processes, interleaved; goal: the median of the paired ratios is
at most 1.03 at each layout.

    OMP_NUM_THREADS=1 python benchmarks/megatron_step.py [--steps N] [--check]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.workload import OPTIMIZER, all_targets, batches, model_folder, paired_cpu_seconds, quartiles
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from engines.batch import Batch
from engines.contract import MicroBatchRules
from engines.losses import SFTLoss
from engines.microbatch import plan_micro_batches
from engines.model_folder import read_config
from engines.process_group import RENDEZVOUS
from engines.worker import TrainingWorker

GOAL = 1.03
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "pp2": {"pipeline_parallel_size": 2, "micro_batch_size": 2},
}


@dataclass(frozen=True)
class MicroBatch:
    """What the hand-written loop feeds Megatron's GPTModel."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    weights: Tensor
    """`[1, rows]`: 1 / targets of the batch where the next token is one, else 0."""
    packed: Any


def micro_batches(batch: Batch, per_micro_batch: int | None) -> list[MicroBatch]:
    """`batch` cut as the engine cuts it."""
    from engines_megatron.rows import Packed

    plan = plan_micro_batches(batch.lengths, rules=MicroBatchRules(), samples_per_micro_batch=per_micro_batch)
    targets = int(batch["loss_mask"].sum())

    def prepare(part: Batch) -> MicroBatch:
        ids, weights = part["input_ids"], part["loss_mask"] / targets
        return MicroBatch(
            ids[None],
            part.position_ids[None],
            ids.roll(-1)[None],
            weights.roll(-1)[None],
            Packed.of(part.lengths, ids.device),
        )

    return [prepare(batch.select(part)) for part in plan.parts]


def hand_written(
    folder: Path, stages: int, per_micro_batch: int | None, over: list[Batch]
) -> Callable[[Batch], float]:
    """A step of the loop that one would write for this model and layout alone; Megatron's groups are there."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer = built(folder, stages)
    prepared = {id(batch): micro_batches(batch, per_micro_batch) for batch in over}

    def forward(
        count: int, data: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        one = next(data)
        losses = model(one.input_ids, one.position_ids, None, labels=one.labels, packed_seq_params=one.packed)

        def measure(losses: Tensor) -> tuple[Tensor, Tensor]:
            loss = (losses * one.weights).sum()
            return loss * count, loss.detach()  # Megatron divides by it

        return losses, measure

    def step(batch: Batch) -> float:
        data = prepared[id(batch)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward, len(data)),
            data_iterator=iter(data),
            model=model,
            num_microbatches=len(data),
            seq_length=max(one.input_ids.shape[1] for one in data),
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        is_last = parallel_state.is_pipeline_last_stage()
        total = torch.stack(losses).sum() if is_last else torch.zeros(())
        if stages > 1:
            dist.broadcast(total, stages - 1)
        return total.item()

    return step


def built(folder: Path, stages: int) -> tuple[Any, Any]:
    """The model of this stage inside Megatron's gradient buffers, and Megatron's optimizer for it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from engines_megatron.architectures import read_architecture
    from engines_megatron.model.spec import decoder_spec
    from engines_megatron.weights import load_pretrained

    told = read_config(str(folder))
    config = TransformerConfig(
        num_layers=told["num_hidden_layers"],
        hidden_size=told["hidden_size"],
        ffn_hidden_size=told["intermediate_size"],
        num_attention_heads=told["num_attention_heads"],
        num_query_groups=told["num_key_value_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=told["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=stages > 1,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        decoder_spec(config, transformer_engine=False, vp_stage=None),
        told["vocab_size"],
        told["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=told["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=told["rope_parameters"]["rope_theta"],
    )
    load_pretrained([model], read_architecture(told), folder, "language_model")
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.train()
    settings = OptimizerConfig(
        optimizer="adam", lr=OPTIMIZER["lr"], weight_decay=0.0, clip_grad=OPTIMIZER["clip_grad"]
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)


def measure(rank: int, processes: int, name: str, steps: int, folder: Path, results: Path) -> None:
    """One process of the layout `name`; each writes its CPU seconds of both to a file in `results`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), RENDEZVOUS: f"file://{results}/rendezvous"}
    torch.set_num_threads(1)
    over = [all_targets(batch) for batch in batches(steps + 2, samples=8, mean=160, spread=0.8)]
    engine = {"strategy": "megatron", "device": "cpu", **LAYOUTS[name]}
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        loss = SFTLoss()
        seconds = paired_cpu_seconds(
            lambda batch: worker.train_mini_batch(batch, loss)["loss"],
            hand_written(folder, processes, LAYOUTS[name].get("micro_batch_size"), over),
            over,
            tolerance=1e-6,
        )
    torch.save(seconds, results / f"{rank}.pt")


def compare(name: str, steps: int, folder: Path) -> float:
    """Print a line about the layout; returns the median of the paired ratios."""
    processes = LAYOUTS[name].get("pipeline_parallel_size", 1)
    with tempfile.TemporaryDirectory() as results:
        spawn(measure, (processes, name, steps, folder, Path(results)), nprocs=processes)
        of_ranks = [torch.load(Path(results) / f"{rank}.pt") for rank in range(processes)]
    ours, theirs = ([sum(times) for times in zip(*of_one, strict=True)] for of_one in zip(*of_ranks, strict=True))
    low, median, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    print(
        f"{name:<8}{statistics.median(ours):>10.3f}{statistics.median(theirs):>14.3f}"
        f"{median:>10.4f}   {low:.4f} to {high:.4f}",
        flush=True,
    )
    return median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="this one alone")
    parser.add_argument("--check", action="store_true", help="exit code 1 if it costs more than is allowed")
    arguments = parser.parse_args()
    print(f"CPU s per step, medians of {arguments.steps} steps; goal: paired ratio at most {GOAL}")
    print(f"{'':<8}{'engine':>10}{'hand-written':>14}{'ratio':>10}   quartiles")
    with model_folder() as folder:
        medians = [compare(name, arguments.steps, folder) for name in arguments.layout or LAYOUTS]
    return int(arguments.check and max(medians) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
