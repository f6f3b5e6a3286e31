"""The rows of a packed micro-batch that a rank computes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class Packed(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with the sequences' lengths as plain numbers.

    `cu_seqlens_q` lies on the device; reading lengths from it would wait for the device in every layer.
    """

    lengths: tuple[int, ...] = ()
    """Rows of each sequence over all context-parallel ranks, padding included."""
