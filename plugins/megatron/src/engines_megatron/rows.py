"""The rows of a packed micro-batch that a rank computes, and the way of their outputs back into packed order.

Under context parallelism of size cp each sequence is padded at its end to a multiple of 2 * cp and cut into that
many chunks, of which rank r holds r and 2 * cp - 1 - r (see `model.attention`). Under sequence parallelism the
rows of a rank must also be a multiple of the tensor-parallel size, so the last sequence is padded further. A
sequence's padding lies behind all its tokens: under causal attention none of them sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.batch import Batch


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed micro-batch, with the sequences' lengths as plain numbers.

    `cu_seqlens_q` lies on the device; reading lengths from it would wait for the device in every layer.
    """

    lengths: tuple[int, ...] = ()
    """Rows of each sequence over all context-parallel ranks, padding included."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packed:
        """Sequences of these lengths, one after another."""
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=tuple(lengths),
        )


def row_count(lengths: Sequence[int], context: int, tensor: int) -> int:
    """Rows that each rank gets of sequences with these lengths.

    `context`: the context-parallel size; `tensor`: the tensor-parallel size under sequence parallelism, else 1.
    More or longer sequences never take fewer rows, and two micro-batches in one never more than both apart, as
    `MicroBatchRules.rows` must.
    """
    whole = sum(_padded(length, context) for length in lengths) // context
    return _up(whole, tensor if context == 1 else lcm(2, tensor))


@dataclass(frozen=True)
class Rows:
    """A micro-batch as one rank of the tensor- and context-parallel ones computes it.

    Rows stand as they do before sequence parallelism, whose cut Megatron's embedding makes; tensor-parallel ranks
    hold the same ones.
    """

    input_ids: Tensor
    """int64 `[1, rows]`; 0 on padding."""
    position_ids: Tensor
    """int64 `[1, rows]`, each row's place in its own sequence, counted on through the padding."""
    padding_mask: Tensor
    """bool `[1, rows]`, True on padding and on every row of a filler: what takes no part in routers' statistics."""
    targets: Tensor
    """int64 `[rows]`, the id of the next token in the row's sequence; -1 where there is none."""
    is_target: Tensor
    """bool `[rows]`, whether the next token is there and marked in `loss_mask` (all are, without that field)."""
    packed: Packed
    _context: ProcessGroup | None
    _gathered: Tensor
    """int64 `[total_tokens]`: each token's row in those of all context-parallel ranks, one rank after another."""
    _first: Tensor
    """bool `[total_tokens]`, True on the first token of each sequence."""
    _last: Tensor
    """int64 `[n]`, the last token of each sequence."""

    @classmethod
    def of(cls, batch: Batch, *, context: ProcessGroup | None, tensor: int) -> Rows:
        """This rank's rows of `batch`, on the device of its tokens. Every rank calls it for itself.

        `context`: the context-parallel group, None without one; `tensor` as for `row_count`.
        """
        ids = batch["input_ids"]
        size, rank = (context.size(), context.rank()) if context is not None else (1, 0)
        lengths = _padded_lengths(batch.lengths, size, tensor)
        tokens, positions, gathered = _places(batch.lengths, lengths, size)
        mine = tokens.chunk(size)[rank].to(ids.device)
        first, last = batch.cu_seqlens[:-1].to(ids.device), batch.cu_seqlens[1:].to(ids.device) - 1
        is_first = torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, first, True)

        is_padding = mine < 0
        following = (mine + 1) % len(ids)  # of padding the first token, of the last token too: no target either
        has_target = ~is_padding & ~is_first[following]
        is_target = has_target & batch["loss_mask"][following].bool() if "loss_mask" in batch else has_target
        return cls(
            input_ids=ids[mine.clamp(min=0)].masked_fill(is_padding, 0)[None],
            position_ids=positions.chunk(size)[rank].to(ids.device)[None],
            padding_mask=(torch.ones_like(is_padding) if batch.is_filler else is_padding)[None],
            targets=ids[following].masked_fill(~has_target, -1),
            is_target=is_target,
            packed=Packed.of(lengths, ids.device),
            _context=context,
            _gathered=gathered.to(ids.device),
            _first=is_first,
            _last=last,
        )

    def gather(self, values: Tensor) -> Tensor:
        """What rows say about their next tokens, `[rows]`, as `[total_tokens]` in packed order, target-aligned.

        First tokens get 0. All context-parallel ranks call it together and get the same. Its backward gives each
        rank its own slice of the gradient: the loss runs on all of them, so a sum would be cp times too large.
        """
        return self._by_token(values).roll(1).masked_fill(self._first, 0)

    def last(self, values: Tensor) -> Tensor:
        """`[n]`: of `[rows]`, the row of each sequence's last token. Called and differentiated like `gather`."""
        return self._by_token(values)[self._last]

    def _by_token(self, values: Tensor) -> Tensor:
        if self._context is not None:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._context
            )
        return values[self._gathered]


def _padded_lengths(lengths: Sequence[int], context: int, tensor: int) -> list[int]:
    """Rows of each sequence over all context-parallel ranks, padding included; arguments as for `row_count`."""
    padded = [_padded(length, context) for length in lengths]
    padded[-1] += row_count(lengths, context, tensor) * context - sum(padded)
    return padded


def _places(lengths: Sequence[int], padded: Sequence[int], context: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of all context-parallel ranks, one rank after another, and the way back; int64, on the CPU.

    `[all_rows]` each row's token, -1 on padding, and its place in its sequence; `[total_tokens]` each token's row.
    """
    tokens, positions, first = [], [], 0
    for length, rows in zip(lengths, padded, strict=True):
        place = torch.arange(rows)
        positions.append(_cut(place, context))
        tokens.append(_cut(torch.where(place < length, place + first, -1), context))
        first += length
    row_tokens = torch.cat(tokens, 1).flatten()
    real = (row_tokens >= 0).nonzero()[:, 0]
    return row_tokens, torch.cat(positions, 1).flatten(), real[row_tokens[real].argsort()]


def _cut(sequence: Tensor, context: int) -> Tensor:
    """`[context, rows]`: what each rank holds of a padded sequence."""
    if context == 1:
        return sequence[None]
    early, late = sequence.view(2, context, -1)
    return torch.cat([early, late.flip(0)], 1)


def _padded(length: int, context: int) -> int:
    return length if context == 1 else _up(length, 2 * context)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
