"""The layer spec's RMSNorm against transformers'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engines_megatron.runtime.cpu import install

install()

from engines_megatron.model.norm import RMSNorm  # noqa: E402


def settings(dtype: torch.dtype = torch.float32, *, sequence_parallel: bool = False) -> Any:
    return SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        params_dtype=dtype,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 1, 24), (7, 4, 24)])  # rows; heads of an attention layer
def test_equals_transformers_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = RMSNorm(config=settings(dtype), hidden_size=24, eps=0.01)
    theirs = LlamaRMSNorm(24, eps=0.01).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.copy_(torch.randn(24)))
    inputs = [(torch.randn(shape) * 0.3).to(dtype).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    outputs = [norm(x) for norm, x in zip((ours, theirs), inputs, strict=True)]
    assert outputs[0].dtype == dtype
    assert torch.equal(*outputs)
    for out in outputs:
        (out.float() * torch.linspace(-1, 1, out.numel()).view(shape)).sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **close)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, **close)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_marks_its_weight_for_sequence_parallelism(sequence_parallel: bool) -> None:
    norm = RMSNorm(config=settings(torch.bfloat16, sequence_parallel=sequence_parallel), hidden_size=8, eps=1e-6)
    assert norm.weight.sequence_parallel is sequence_parallel
    assert norm.weight.dtype == torch.bfloat16
    assert list(norm.state_dict()) == ["weight"]
