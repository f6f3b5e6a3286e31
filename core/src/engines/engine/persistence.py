"""What a checkpoint of an engine holds: its shards and small state, the random state, and who it is of."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from engines import checkpoint
from engines.checkpoint import CheckpointInfo, Contents, Saver
from engines.checkpoint_folder.identity import check_goes_on
from engines.checkpoint_folder.manifest import CONTENTS, Content, unfit
from engines.contract import EngineContext, ExportPlan, Part
from engines.determinism import rng_state, set_rng_state
from engines.errors import CheckpointError, ConfigError, did_you_mean
from engines.selection import Selection
from engines.versions import deciding_versions
from engines.weights import ModelFiles

log = logging.getLogger("engines")


def describe_checkpoint(
    hook: Any,
    ctx: EngineContext,
    files: ModelFiles,
    selection: Selection,
    step: int,
    contents: Collection[Content] = CONTENTS,
) -> CheckpointInfo:
    """Which run a checkpoint with `contents` is of; equal on all ranks."""
    optimizer = ctx.optimizer if "optimizer" in contents else None
    return CheckpointInfo(
        step=step,
        backend=selection.backend,
        device=selection.device,
        distributions=deciding_versions(selection.distribution),
        model=checkpoint.fingerprint(files.config(), files.contents.get("tokenizer.json")),
        model_type=ctx.model_type,
        optimizer=optimizer.model_dump(mode="json") if optimizer is not None else None,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        layout=hook.describe()["layout"],
    )


def save_engine(
    path: str | os.PathLike[str],
    hook: Any,
    ctx: EngineContext,
    files: ModelFiles,
    info: CheckpointInfo,
    state: dict[str, Any],
    *,
    contents: Collection[Content],
    saver: Saver,
    background: bool,
) -> None:
    """Write one checkpoint directory; all ranks."""
    parts = _parts(ctx) & frozenset(contents)
    dtype: torch.dtype = getattr(torch, ctx.model.dtype)
    given = Contents(
        shards=hook.shards(parts=parts) if parts else (),
        state={"engine": hook.extra_state(), "run": state} if "state" in contents else None,
        rank_state=rng_state(ctx.device) if "state" in contents else None,
        info=info,
        model_files=files,
        copy=(hook.iter_weights(plan=ExportPlan()), dtype) if "huggingface" in contents else None,
    )
    saver.save(os.fspath(path), given, background=background)


def check_contents(contents: Collection[str]) -> None:
    """Raise `ConfigError` for contents that are unknown, and for a checkpoint that would hold no model."""
    for word in contents:
        if word not in CONTENTS:
            raise ConfigError(
                f"contents: a checkpoint can't hold {word!r}.{did_you_mean(word, CONTENTS)}",
                f"It can hold {', '.join(CONTENTS)}.",
            )
    if fault := unfit(contents):
        raise ConfigError(f"contents: {fault}")


def load_engine(path: str | os.PathLike[str], hook: Any, ctx: EngineContext, info: CheckpointInfo) -> dict[str, Any]:
    """Fill the engine from a checkpoint of the same model, engine and optimizer, at any layout; all ranks.

    Returns the `state` that was saved. Raises `CheckpointError` with a line per difference, before anything
    is changed.
    """
    found = checkpoint.open(os.fspath(path))
    check_goes_on(found.path, found.manifest, trains=ctx.optimizer is not None)
    differences = checkpoint.compare(found.info, info)
    if differences:
        raise CheckpointError(f"{found.path} belongs to another run:\n  " + "\n  ".join(differences))
    parts = _parts(ctx)
    reader = found.reader(sorted(parts & set(found.manifest.contents)))
    hook.load_shards(reader=reader, parts=parts)
    reader.close()
    hook.load_extra_state(state=found.state["engine"])
    if found.info.world_size == info.world_size and found.info.layout == info.layout:
        saved = found.rank_state(dist.get_rank() if dist.is_initialized() else 0)
        assert saved is not None, "as many ranks saved as load"
        if not set_rng_state(saved, ctx.device):
            log.warning(
                "%s was saved on %s: random numbers of %s start anew", found.path, found.info.device, info.device
            )
    else:
        log.warning(
            "%s was saved by %d ranks at another layout: each rank's random state starts anew",
            found.path,
            found.info.world_size,
        )
    run: dict[str, Any] = found.state["run"]
    return run


def _parts(ctx: EngineContext) -> frozenset[Part]:
    return frozenset({"model", "optimizer"}) if ctx.optimizer is not None else frozenset({"model"})
