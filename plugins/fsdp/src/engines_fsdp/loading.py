"""Weights into a sharded model: each rank reads its own rows, no rank a whole model."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from engines.checkpoint import open_weights
from engines.models import PackedCausalLM, load_plan
from engines_fsdp.sharding import reshard
from engines_fsdp.shards import local_shard


def load_pretrained(model: PackedCausalLM, path: str | Path) -> None:
    """Fill the materialised `model` from the folder or checkpoint at `path`; compare it to transformers'. All ranks.

    Raises `ModelError` naming weights that are missing, unexpected or of another shape, `CheckpointError` for a
    checkpoint that is damaged.
    """
    folder = open_weights(path)
    try:
        sources = load_plan(model.model, folder)
        for name, weight in model.named_weights():
            block = local_shard(name, weight)
            if block.tensor.numel():
                block.tensor.copy_(sources[name].read(block.offset, tuple(block.tensor.shape)))
    finally:
        folder.close()
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "check")
    model.check()
    reshard(model)
