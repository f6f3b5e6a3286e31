"""`Engine`: what users and frameworks hold. Final; it owns modes, nesting, agreement between ranks, and errors.

The author's object is reached only through its hooks and never handed out, or wrappers would be bypassed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.agreement import Peers
from engines.batch import OUTPUTS, OUTPUTS_OF, Batch, TokenOutputs
from engines.checkpoint import CheckpointInfo, Saver
from engines.checkpoint_folder.manifest import RESUMABLE, Content
from engines.config import ModelConfig
from engines.contract import BaseEngine, EngineContext, ExportPlan, MicroResult, Mode, Part, Ranks, StepResult
from engines.engine.batching import Pass, prepare_pass, restore_outputs
from engines.engine.binding import EnginePluginManager, check_wrapper
from engines.engine.bound_loss import StepLoss
from engines.engine.collectives import share_outputs
from engines.engine.layout import check_layout
from engines.engine.metrics import reduce_results
from engines.engine.persistence import check_contents, describe_checkpoint, load_engine, save_engine
from engines.errors import CapabilityError, ConfigError
from engines.losses import Loss
from engines.registry import Selection
from engines.weights import ModelFiles


@dataclass(frozen=True)
class InferResult:
    """What `Engine.infer_batch` returns."""

    outputs: TokenOutputs | None
    """In the batch's packed order, on the engine's device; None where this rank holds none and none were shared."""
    metrics: dict[str, Any]
    """`tokens`, `targets`, the loss and its terms if there was one, engine metrics; equal on all ranks."""


@final
class Engine:
    """A training backend behind its contract; made by `engines.create`.

    Every rank of the engine calls every method, in the same order, with its replica's share of the batch.
    """

    def __init__(
        self, base: BaseEngine, manager: EnginePluginManager, ctx: EngineContext, selection: Selection
    ) -> None:
        self._base = base
        self._manager = manager
        self._ctx = ctx
        self._mode: Mode | None = None
        self._adapter_enabled = True
        self._closed = False
        self._files = ModelFiles(Path(ctx.model.path), {})
        self._saver = Saver()
        self.selection = selection
        """Which engine this is, and why."""

    @property
    def ranks(self) -> Ranks:
        """Where this process stands; readable before `initialize`."""
        return self._base.ranks

    @property
    def model(self) -> ModelConfig:
        """Which model this engine was created for."""
        return self._ctx.model

    @property
    def model_files(self) -> ModelFiles:
        """Config, tokenizer and chat template of that model, as they were at `initialize`; none before."""
        return self._files

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._ctx.device

    @property
    def lr(self) -> float:
        """The learning rate that the next step will use."""
        self._need_optimizer()
        return self._base.lr

    def get_data_parallel_rank(self) -> int:
        """Index of the share of samples that this rank works on."""
        return self.ranks.dp_rank

    def get_data_parallel_size(self) -> int:
        """Number of shares."""
        return self.ranks.dp_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Ranks that work on other shares; None in one process."""
        return self.ranks.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank is the one of its replica that holds outputs and reports."""
        return self.ranks.is_output

    def initialize(self) -> None:
        """Build the model, load its weights, make the optimizer; leaves the engine in eval mode."""
        self._files = ModelFiles.read(self._ctx.model.path)
        self._hook.initialize()
        self._set_mode("eval")

    def wrap(self, *wrappers: object) -> None:
        """Put objects with `@hookimpl(wrapper=True)` methods around this engine, the last one outermost.

        Raises `ContractError` if a wrapper's hooks don't fit the contract; then none of them is put on.
        """
        for wrapper in wrappers:
            check_wrapper(wrapper)
        for wrapper in wrappers:
            self._manager.register(wrapper)

    def unwrap(self, wrapper: object) -> None:
        """Take a wrapper off again."""
        self._manager.unregister(wrapper)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Dropout on inside; whatever was set before is restored, nested and after exceptions too."""
        with self._in_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Dropout off inside; whatever was set before is restored, nested and after exceptions too."""
        with self._in_mode("eval"):
            yield

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model answers inside: the reference model is the actor with its adapter off."""
        self._need("lora", "disable_adapter()")
        before = self._adapter_enabled
        self._switch_adapter(False)
        try:
            yield
        finally:
            self._switch_adapter(before)

    def train_batch(self, batch: Batch, loss: Loss) -> dict[str, Any]:
        """Gradients of `loss` over all shares, then one optimizer step; the schedule is the caller's to advance.

        `batch`: this replica's share, on the CPU; may be empty. Returns metrics, equal on all ranks: `loss`,
        `grad_norm` (before clipping), `lr`, `tokens`, `targets`, `skipped_step` (None, "empty", "non_finite"),
        each loss term's mean as `loss/TERM`, and the engine's own. A step with non-finite gradients, or without
        anything that counts, changes nothing; `not_finite` then names the parameters with such gradients. Raises
        `BatchError` on all ranks if any share is unfit, and, before anything is done, `CheckpointError` if a
        checkpoint could not be written in the background.
        """
        self._need_optimizer()
        self._saver.poll()
        with self.train_mode():
            self._hook.zero_grad()
            try:
                metrics = self.forward_backward(batch, loss)
                step = StepResult(0.0, self.lr, "empty") if metrics.pop("empty") else self._step()
            except BaseException:
                self._hook.zero_grad()
                raise
            self._hook.zero_grad()
        return {
            "loss": metrics.pop("loss"),
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "skipped_step": step.skipped,
            **({"not_finite": list(step.not_finite)} if step.skipped == "non_finite" else {}),
            **metrics,
        }

    def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, Any]:
        """Accumulate gradients of `loss` over all shares, without a step; for loops that step by themselves.

        Returns `train_batch`'s metrics without those of the step, and `empty`: whether nothing counts, in which
        case no forward ran.
        """
        self._check_needs(loss.needs, f"{type(loss).__name__} reads")
        with self.train_mode():
            done = self._prepare(batch, loss, forward_only=False)
            bound = StepLoss(loss, done.denominators)
            empty = all(d == 0 for name, d in done.denominators.items() if loss.coefficients[name])
            results: list[MicroResult] | None = []
            if not empty:
                results = self._hook.forward_backward_batch(
                    micro_batches=done.micro_batches, loss=bound, needs=frozenset(), forward_only=False
                )
        return {**self._metrics(results, done, bound), "empty": empty}

    def infer_batch(
        self,
        batch: Batch,
        *,
        needs: Iterable[str] = ("log_probs",),
        loss: Loss | None = None,
        share: bool = False,
    ) -> InferResult:
        """The same forward without gradients, in eval mode; weights, gradients and optimizer stay as they are.

        `needs`: which outputs to return (`engines.batch.OUTPUTS`); empty: none, only the loss's metrics.
        `share`: broadcast outputs inside the replica, so that every rank of it has them for a next step.
        """
        wanted = frozenset(needs)
        self._check_needs(wanted, "the call asks for")
        if loss is not None:
            self._check_needs(loss.needs, f"{type(loss).__name__} reads")
        with self.eval_mode(), torch.no_grad():
            done = self._prepare(batch, loss, forward_only=True)
            bound = StepLoss(loss, done.denominators, keep=wanted) if loss is not None else None
            results = self._hook.forward_backward_batch(
                micro_batches=done.micro_batches, loss=bound, needs=wanted, forward_only=True
            )
        metrics = self._metrics(results, done, bound)
        outputs = None
        if wanted and results is not None:
            outputs = restore_outputs([r.outputs for r in results if r.outputs is not None], done)
        if wanted and share:
            names = sorted(wanted | ({"last_values"} if "values" in wanted else set()))
            outputs = share_outputs(outputs, names, batch.num_tokens, len(batch), self.ranks)
        return InferResult(outputs, metrics)

    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._hook.zero_grad()

    def optimizer_step(self) -> StepResult:
        """Clip and step on the gradients that `forward_backward` accumulated."""
        self._need_optimizer()
        self._saver.poll()
        return self._step()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; returns the rate that the next step will use."""
        self._need_optimizer()
        return float(self._hook.schedule_step())

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts of the engine to "cpu" or back to its own device; needs the capability `offload`."""
        self._need("offload", "to()")
        flags: tuple[tuple[Part, bool], ...] = (("model", model), ("optimizer", optimizer), ("grads", grad))
        self._hook.move(device=device, parts=frozenset(part for part, on in flags if on))

    def get_per_tensor_param(self, plan: ExportPlan | None = None) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """A lazy stream of (Hugging Face name, full tensor), and the adapter's config (None: merged, or none).

        Every rank must drain the stream, in the same order.
        """
        plan = plan or ExportPlan()
        if plan.adapters == "only":
            self._need("lora", 'ExportPlan(adapters="only")')
        self._need("export", "get_per_tensor_param()")
        return self._hook.iter_weights(plan=plan), None

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
        contents: Collection[Content] = RESUMABLE,
        background: bool = False,
    ) -> None:
        """Write model, optimizer, schedule and random state as one directory that appears when it is complete.

        `step`: optimizer steps done. `state`: the caller's own, JSON values, equal on all ranks. `contents`: some of
        "model", "optimizer", "state" (schedule, random and the caller's state) and "huggingface", a copy as an export
        writes it. Raises `CheckpointError` on all ranks if any fails; nothing half-written remains.

        `background`: return when everything is copied to host memory; threads write it, and the directory appears
        during the first step after they have, or in `finish_saving`, which also raise what went wrong. A save that
        finds another one unfinished waits for it, and logs that it did.
        """
        check_contents(contents)
        if "huggingface" in contents:
            self._need("export", "a Hugging Face copy in a checkpoint")
        save_engine(
            path,
            self._hook,
            self._ctx,
            self.model_files,
            self._describe_run(step, contents),
            dict(state or {}),
            contents=contents,
            saver=self._saver,
            background=background,
        )

    @property
    def saving(self) -> Path | None:
        """The checkpoint that is being written in the background, equal on all ranks; None: there is none."""
        return self._saver.pending

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises `CheckpointError` on all ranks."""
        self._saver.finish()

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote, at any layout; returns its `state`.

        Raises `CheckpointError` if it is incomplete, damaged, or of another model, engine or optimizer, or was saved
        without optimizer or state.
        """
        self._saver.finish()
        return load_engine(path, self._hook, self._ctx, self._describe_run(0))

    def describe(self) -> dict[str, Any]:
        """What was built, read from live groups and model: `layout` and `parameters` that this rank holds."""
        return dict(self._hook.describe())

    def check_layout(self) -> None:
        """Raise `ContractError` if this rank's part of what was built has another layout than was asked for.

        For those who train or compare, after `initialize`: an engine that declares a parallelism and ignores its size
        has the right numbers, and only costs what it was chosen to save.
        """
        check_layout(self.describe()["layout"], self._ctx.config, self.selection)

    def close(self) -> None:
        """Free process groups and memory; safe to call twice and after a failed `initialize`.

        Waits for a checkpoint that is being written; raises `CheckpointError` if it failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._saver.finish()
        finally:
            self._manager.hook.close()
            for _, plugin in self._manager.list_name_plugin():  # `get_plugins` would hash them
                self._manager.unregister(plugin)

    def abandon_saving(self) -> None:
        """Don't wait for a checkpoint that is being written: it will never be complete. For ends by an error."""
        self._saver.abandon()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.abandon_saving()
        self.close()

    @property
    def _hook(self) -> Any:
        assert not self._closed, "this engine is closed"
        return self._manager.hook

    def _describe_run(self, step: int, contents: Collection[Content] = RESUMABLE) -> CheckpointInfo:
        return describe_checkpoint(self._hook, self._ctx, self.model_files, self.selection, step, contents)

    def _prepare(self, batch: Batch, loss: Loss | None, *, forward_only: bool) -> Pass:
        rules = self._hook.micro_batch_rules(forward_only=forward_only)
        return prepare_pass(batch, loss, self._ctx.config, rules, self.ranks, self._files.vocab_size)

    def _metrics(self, results: list[MicroResult] | None, done: Pass, bound: StepLoss | None) -> dict[str, Any]:
        sums, metrics = reduce_results(results, sorted(done.denominators), self.ranks)
        report: dict[str, Any] = {"tokens": done.tokens, "targets": done.targets}
        if bound is not None:
            report["loss"] = bound.value(sums)
            report |= {f"loss/{name}": value for name, value in bound.means(sums).items()}
        return {**report, **metrics}

    def _step(self) -> StepResult:
        result: StepResult = self._hook.step()
        assert result.skipped is not None or math.isfinite(result.grad_norm), "a non-finite step must be skipped"
        if result.skipped != "non_finite":
            return result
        names = dict.fromkeys(name for of_rank in Peers.of().all_gather(result.not_finite) for name in of_rank)
        return replace(result, not_finite=tuple(names))

    @contextmanager
    def _in_mode(self, mode: Mode) -> Iterator[None]:
        before = self._mode
        self._set_mode(mode)
        try:
            yield
        finally:
            if before is not None:
                self._set_mode(before)

    def _set_mode(self, mode: Mode) -> None:
        if mode != self._mode:
            self._hook.set_mode(mode=mode)
            self._mode = mode

    def _switch_adapter(self, enabled: bool) -> None:
        if enabled != self._adapter_enabled:
            self._hook.set_adapter_enabled(enabled=enabled)
            self._adapter_enabled = enabled

    def _need(self, capability: str, what: str) -> None:
        if capability not in self._ctx.capabilities:
            raise CapabilityError(
                f"{what} needs the capability {capability}, which {self.selection.backend} on "
                f"{self.selection.device} ({self.selection.distribution}) does not declare",
                f"see `engines list --can {capability}` for engines that do",
            )

    def _need_optimizer(self) -> None:
        if self._ctx.optimizer is None:
            raise ConfigError("this engine was created without an optimizer; it can only infer", "pass `optimizer`")

    def _check_needs(self, needs: frozenset[str], who: str) -> None:
        """Refuse outputs that this engine doesn't give, before ranks wait for each other."""
        unknown = sorted(needs - OUTPUTS)
        if unknown:
            raise ConfigError(f"{who} unknown outputs {unknown}; engines give {sorted(OUTPUTS)}")
        model_type = self._ctx.model_type
        mine = OUTPUTS_OF.get(model_type, OUTPUTS)
        if lacking := needs - mine:
            owners = " or ".join(name for name, given in OUTPUTS_OF.items() if given & lacking)
            raise ConfigError(
                f"{who} {', '.join(sorted(lacking))}, which a {owners} gives; this engine is a {model_type}",
                f"create it with another model_type, or ask for {' or '.join(sorted(mine))}",
            )
        if "entropy" in needs:
            self._need("entropy", "the output entropy")

    def __init_subclass__(cls, **kwargs: Mapping[str, Any]) -> None:
        raise TypeError("Engine is final: subclass BaseEngine to add a backend, register a wrapper to observe one")
