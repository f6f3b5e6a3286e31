"""`fully_shard` on each layer and on the whole model, set up to sum gradients instead of averaging them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from engines.errors import LaunchError
from engines.models import PackedCausalLM


def shard_model(
    model: PackedCausalLM, mesh: DeviceMesh | None, *, dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard `model` in place over `mesh`: a communication group per layer and one for what is left.

    Parameters stay float32; with another `dtype` they are gathered in that, and layers compute in it. The root
    group (embeddings, last norm, head) stays gathered from forward to backward, since both end or begin there.
    One process in float32 has nothing to shard or cast: its model stays plain, and saves FSDP's copies.
    Raises `LaunchError` where the precision needs FSDP and there is no process group.
    """
    if dtype == torch.float32 and (mesh is None or mesh.size() == 1):
        return
    if mesh is None:
        raise LaunchError(
            f"model.dtype: {str(dtype).removeprefix('torch.')} on fsdp2 needs a process group, also in one process",
            "start through `engines train` or torchrun, or call torch.distributed.init_process_group first",
        )
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root's input is the batch: there is nothing in it to cast.
    root_policy = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        _sum_gradients(module)


def fsdp_modules(model: Module) -> Iterator[FSDPModule]:
    """The root and every layer that is a communication group of its own; none if `model` isn't sharded."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _sum_gradients(module: FSDPModule) -> None:
    """Make a gradient the sum over ranks, where FSDP averages by default.

    Both calls are needed, on every module: the factor alone fails (gloo has no PREMUL_SUM), and on the root
    alone both do nothing for its layers.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # Parameters may go unused on some ranks only (experts without tokens); the collectives must match.
    module.set_reduce_scatter_unused_params(True, recurse=False)


def set_reduction(model: Module, *, last: bool, every: bool) -> None:
    """Say whether the next backward reduces gradients: at the `last` micro-batch of a step, or at `every` one.

    Replicas sum up once a step either way.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or every)
        model.set_requires_all_reduce(last)


def reshard(model: Module) -> None:
    """Free all gathered parameters, so that the model's own are the shards again.

    Needed after forwards without a backward: the root never frees its own, and would go on computing with them
    after the shards have changed.
    """
    for module in fsdp_modules(model):
        module.reshard()


def abandon(model: Module) -> None:
    """Leave a forward or backward that raised: drop what is gathered, in flight or accumulated. No collective."""
    if not isinstance(model, FSDPModule):
        return
    model.reset_iter_state()
    # torch 2.13 forgets the gradients of micro-batches that were not reduced yet; they would join the next step's.
    for module in fsdp_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
