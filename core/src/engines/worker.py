"""`TrainingWorker`: trains, infers, checkpoints and exports on any engine, one process per rank (SPMD)."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from engines.batch import Batch
from engines.checkpoint_folder.manifest import RESUMABLE, Content
from engines.config import EngineConfig, ModelConfig, OptimizerConfig
from engines.configuring import lack, validate
from engines.contract import ExportPlan
from engines.determinism import full_determinism, seed_everything
from engines.device_services import DeviceServices
from engines.durable import local_folder
from engines.engine import Engine, InferResult, create
from engines.engine.collectives import gather_outputs
from engines.engine.creating import local_device
from engines.errors import BatchError, CapabilityError, ModelError
from engines.loading import load
from engines.losses import Loss
from engines.microbatch import split_over_ranks, units_of
from engines.process_group import join_process_group, leave_process_group
from engines.registry import registry
from engines.versions import deciding_versions
from engines.weights import write_pretrained


def auto_select(
    model: ModelConfig | Mapping[str, Any], device: str | None = None, *, model_type: str = "language_model"
) -> tuple[EngineConfig, OptimizerConfig]:
    """The settings to use when nobody chose: the highest-priority available engine, AdamW with its defaults.

    Raises `EngineNotFound` with every candidate and why it was left.
    """
    if not isinstance(model, ModelConfig):
        validate(ModelConfig, model, where="model")
    selection = registry.resolve(model_type, None, device)
    return EngineConfig(strategy=selection.backend, device=selection.device), OptimizerConfig()


class TrainingWorker:
    """One rank of a training run. Every rank makes one and calls the same methods with the same batches.

    The worker splits each batch over data-parallel ranks; nothing in it knows which engine is below. It makes
    the default process group unless somebody has; the last worker that is closed destroys one that a worker made.
    """

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any],
        engine: EngineConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        *,
        model_type: str = "language_model",
        total_steps: int | None = None,
        seed: int = 0,
        deterministic: bool = False,
        process_timeout_s: float = 600,
        wrappers: Iterable[object] = (),
    ) -> None:
        """Choose and construct the engine; nothing is loaded yet.

        `engine`: settings, or a mapping that the chosen plugin's own class validates; without a strategy the
        best available engine is taken (`auto_select`). `optimizer`: None for a worker that only infers.
        """
        settings = engine.model_dump(exclude_unset=True) if isinstance(engine, EngineConfig) else dict(engine or {})
        self.selection = registry.resolve(model_type, settings.get("strategy"), configured=settings.get("device"))
        if deterministic and "deterministic" not in self.selection.capabilities:
            raise CapabilityError(
                f"full determinism {lack('deterministic', self.selection.backend, registry.engines_with)}"
            )
        load(self.selection)  # its environment and its patches must be there before a device is first used
        self.device = local_device(self.selection)
        if deterministic:
            full_determinism(self.device)
        self._seed = seed
        seed_everything(seed)
        DeviceServices(self.device).select()
        self._shares_group = join_process_group(
            self.device, self.selection.device_spec.dist_backend, process_timeout_s
        )
        try:
            self.engine: Engine = create(
                model,
                settings,
                optimizer,
                model_type=model_type,
                total_steps=total_steps,
                selection=self.selection,
                wrappers=wrappers,
            )
        except BaseException:
            self._leave_group()
            raise
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def initialize(self) -> None:
        """Build the model, load its weights, make the optimizer.

        Equal seeds on all ranks until here; from here on data-parallel ranks draw different dropout masks.
        """
        self.engine.initialize()
        seed_everything(self._seed, "data_parallel", self.engine.ranks.dp_rank)

    def train_mini_batch(self, batch: Batch, loss: Loss) -> dict[str, Any]:
        """One optimizer step on the whole `batch`; the schedule advances unless the step was skipped.

        `batch`: the same on every rank, split here by work; ranks may get different counts, also none. Returns
        `Engine.train_batch`'s metrics, equal on all ranks and to those of a single process.
        """
        metrics = self.engine.train_batch(self._share(batch), loss)
        if metrics["skipped_step"] is None:
            self.engine.lr_scheduler_step()
        return metrics

    def train_batch(
        self, batch: Batch, loss: Loss, *, mini_batch_size: int, epochs: int = 1, shuffle_seed: int | None = None
    ) -> list[dict[str, Any]]:
        """Cut `batch` into mini-batches of `mini_batch_size` sequences and train on each, `epochs` times over.

        The PPO and GRPO update: one rollout batch, several optimizer steps. `shuffle_seed`: shuffle each epoch
        (None: keep the order). Returns the metrics of every step, in order.
        """
        return [
            self.train_mini_batch(batch.select(indices), loss)
            for indices in _mini_batches(batch, mini_batch_size, epochs, shuffle_seed)
        ]

    def infer_batch(
        self, batch: Batch, *, needs: Iterable[str] = ("log_probs",), loss: Loss | None = None
    ) -> InferResult:
        """Outputs for the whole `batch`, in its packed order, on the CPU of every rank: ready for a next step.

        `batch`: the same on every rank. Weights, gradients, optimizer and modes stay as they are.
        """
        wanted = frozenset(needs)
        shares = self._shares(batch)
        mine = shares[self.engine.ranks.dp_rank]
        result = self.engine.infer_batch(batch.select(mine), needs=wanted, loss=loss, share=True)
        if result.outputs is None:
            return result
        return InferResult(gather_outputs(result.outputs, shares, batch, self.engine.ranks), result.metrics)

    def evaluate(self, batch: Batch, loss: Loss) -> dict[str, Any]:
        """`loss` of the whole `batch` without training: `loss`, its terms, `tokens`, `targets`."""
        return self.infer_batch(batch, needs=(), loss=loss).metrics

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
        contents: Collection[Content] = RESUMABLE,
        background: bool = False,
    ) -> None:
        """Write model, optimizer, schedule, random state and `state` (JSON) as one checkpoint directory.

        See `Engine.save_checkpoint`, also for `contents` and `background`.
        """
        self.engine.save_checkpoint(path, step=step, state=state, contents=contents, background=background)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote, at any number of processes; returns its `state`."""
        return self.engine.load_checkpoint(path)

    def export(self, path: str | os.PathLike[str], plan: ExportPlan | None = None) -> None:
        """Write a Hugging Face folder, as `save_pretrained` of the model would; streams, rank 0 writes.

        A value model becomes a sequence classification of one label, whose score is the value after the last token.
        """
        stream, _ = self.engine.get_per_tensor_param(plan)
        write_pretrained(
            stream,
            source=self.engine.model_files,
            target=local_folder(os.fspath(path), error=ModelError),
            dtype=getattr(torch, self.engine.model.dtype),
            is_writer=self.rank == 0,
            model_type=self.selection.model_type,
        )

    def describe(self) -> dict[str, Any]:
        """What was built, read from live process groups and models of all ranks; equal on all of them.

        Raises `ContractError` if that is another layout than was asked for.
        """
        self.engine.check_layout()
        mine = self.engine.describe()
        everyone: list[dict[str, Any] | None] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        built = [one for one in everyone if one is not None]
        return {
            "strategy": self.selection.backend,
            "device": self.selection.device,
            "world_size": self.world_size,
            "layout": mine["layout"],
            "distributions": deciding_versions(self.selection.distribution),
            "parameters_per_rank": [one["parameters"] for one in built],
        }

    def close(self) -> None:
        """Free the engine, and the process group if a worker made it and this is the last; safe to call twice."""
        try:
            self.engine.close()
        finally:
            self._leave_group()

    def __enter__(self) -> TrainingWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.engine.abandon_saving()
        self.close()

    def _shares(self, batch: Batch) -> list[list[int]]:
        return split_over_ranks(batch.lengths, self.engine.ranks.dp_size, groups=batch.groups)

    def _share(self, batch: Batch) -> Batch:
        return batch.select(self._shares(batch)[self.engine.ranks.dp_rank])

    def _leave_group(self) -> None:
        if self._shares_group:
            leave_process_group()
        self._shares_group = False


def _mini_batches(batch: Batch, size: int, epochs: int, seed: int | None) -> Iterator[list[int]]:
    """Indices of each mini-batch: at most `size` sequences in their, or shuffled, order, groups kept whole."""
    units = units_of(len(batch), batch.groups)
    largest = max(units, key=len, default=())
    if len(largest) > size:
        raise BatchError(
            f"sequences {', '.join(map(str, largest))} form one group, but a mini-batch holds at most {size}",
            f"raise mini_batch_size to at least {len(largest)}",
        )
    for epoch in range(epochs):
        if seed is not None:
            units = units_of(len(batch), batch.groups)
            random.Random(f"{seed}/{epoch}").shuffle(units)
        mini_batch: list[int] = []
        for unit in units:
            if len(mini_batch) + len(unit) > size:
                yield mini_batch
                mini_batch = []
            mini_batch += unit
        if mini_batch:
            yield mini_batch
