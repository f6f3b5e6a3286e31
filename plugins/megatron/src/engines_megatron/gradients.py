"""Gradient buffers and their reduction: Megatron's DistributedDataParallel around each chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engines_megatron.model.chunk import GPTChunk


class Gradients:
    """float32 gradients of this rank's chunks, reduced over data-parallel ranks at the end of each pass.

    Megatron reduces what lies in the buffers; a second pass on top of a first one would reduce the first one again
    over tensor-parallel ranks and embeddings. So what earlier passes left is put aside meanwhile.
    """

    def __init__(self, chunks: Sequence[GPTChunk], config: TransformerConfig, *, distributed_optimizer: bool) -> None:
        """All ranks call it, with loaded weights."""
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
            average_in_collective=False,
        )
        self.modules = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        """The chunks as Megatron's schedules and optimizers take them."""
        self._dirty = False

    def zero(self) -> None:
        """Drop accumulated gradients."""
        if self._dirty:
            self._zero_buffers()
        self._dirty = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around one pass that ends with Megatron's reduction."""
        earlier = [buffer.clone() for buffer in self._buffers()] if self._dirty else []
        if earlier:
            self._zero_buffers()
        self._dirty = True
        yield
        for buffer, value in zip(self._buffers(), earlier, strict=False):
            buffer.add_(value)

    def close(self) -> None:
        """Let go of the chunks.

        Hooks on the gradients of their parameters refer to Megatron's modules. Mixtures of experts keep a pass's last
        tensors, whose graph leads to those hooks: a cycle through C++, which no garbage collector sees.
        """
        for module in self.modules:
            del module.module

    def _zero_buffers(self) -> None:
        for module in self.modules:
            module.zero_grad_buffer()

    def _buffers(self) -> list[Tensor]:
        return [
            buffer.grad_data
            for module in self.modules
            for buffer in (*module.buffers, *module.expert_parallel_buffers)
        ]
