"""RMSNorm of the layer spec."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, as transformers' `LlamaRMSNorm` rounds it.

    The norm is taken in float32 and rounded to the input's dtype before the multiplication, so that a model in low
    precision agrees with transformers. Megatron-Core's `WrappedTorchNorm` rounds once and refuses sequence
    parallelism; what that needs is the mark on the weight: a rank normalizes only its own rows, so the weight's
    gradient is summed over the tensor-parallel ranks. Built by Megatron from the spec, on every rank.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", config.normalization
        assert not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` `[..., hidden_size]`, rows of one rank or heads of an attention layer."""
        normalized = rms_norm(hidden.float(), self.weight.shape, eps=self.eps)
        return self.weight * normalized.to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
