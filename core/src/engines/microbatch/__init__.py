"""Which samples go to which rank and into which micro-batch: pure Python on lengths, no torch.

`split_over_ranks` deals a mini-batch out to data-parallel ranks, `plan_micro_batches` cuts a rank's share
into micro-batches that obey the engine's `MicroBatchRules`. The same arguments give the same answer on every
rank and platform.
"""

from __future__ import annotations

from engines.microbatch.partition import balance, split_over_ranks, units_of, work
from engines.microbatch.plan import MicroBatchPlan, agreed_count, plan_micro_batches

__all__ = [
    "MicroBatchPlan",
    "agreed_count",
    "balance",
    "plan_micro_batches",
    "split_over_ranks",
    "units_of",
    "work",
]
