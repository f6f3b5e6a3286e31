"""Warnings of Megatron-Core that a user of the engine can do nothing about."""

from __future__ import annotations

import warnings

MEGATRON = r"megatron\.core"
ANYWHERE = (
    (r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1", MEGATRON),  # experts' own size
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", MEGATRON),  # views of the distributed optimizer
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", r"torch\.distributed"),
)
ON_A_CPU = (
    (r"(Transformer Engine and Apex are|Apex is) not installed", MEGATRON),
    (r"When using (async grad allreduce|sequence parallelism) it is recommended to set .* CUDA_DEVICE", MEGATRON),
)


def silence(*, cpu: bool = False) -> None:
    """Have this process say none of them; `cpu`: nor what only concerns CUDA."""
    for message, module in (*ANYWHERE, *(ON_A_CPU if cpu else ())):
        warnings.filterwarnings("ignore", message, module=module)
