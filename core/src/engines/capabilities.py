"""What engines can declare that they do: the closed vocabulary of manifest api 1.

A recipe field names the capability that it needs; an engine that does not declare it refuses the field
before anything starts. Words outside this list are spelt `x-vendor.name` and mean what their vendor says.
"""

from __future__ import annotations

import re
from typing import Final

CAPABILITIES: Final[dict[str, str]] = {
    "data_parallel": "different samples on different ranks",
    "tensor_parallel": "weight matrices split over ranks",
    "sequence_parallel": "activations between tensor-parallel layers split along the sequence",
    "pipeline_parallel": "layers split over ranks, micro-batches scheduled through them",
    "virtual_pipeline_parallel": "several chunks of layers on each pipeline stage",
    "context_parallel": "each sequence split over ranks, attention across them",
    "expert_parallel": "experts of a mixture split over ranks",
    "expert_tensor_parallel": "each expert's matrices split over ranks",
    "hybrid_shard": "parameters sharded inside a group and replicated across groups",
    "activation_checkpointing": "activations recomputed in the backward pass",
    "bfloat16": "compute in bfloat16, reduce in float32",
    "export": "full tensors streamed out under Hugging Face names",
    "offload": "parameters, gradients and optimizer state moved to host memory and back",
    "lora": "low-rank adapters trained on a frozen base",
    "router_replay": "expert routes recorded in one pass and replayed in another",
    "moe_aux_loss": "the router's load-balancing loss enters the gradient",
    "distributed_optimizer": "optimizer state sharded over data-parallel ranks",
    "entropy": "entropy of the next-token distribution, per token",
    "deterministic": "two runs with equal seeds are equal to the bit",
}

VENDOR_CAPABILITY: Final = re.compile(r"x-[a-z0-9][a-z0-9_-]*\.[a-z0-9][a-z0-9_.-]*")


def is_capability(word: str) -> bool:
    """Whether `word` is in the vocabulary or spelt as a vendor's own."""
    return word in CAPABILITIES or VENDOR_CAPABILITY.fullmatch(word) is not None
