"""Whether installed engines train the same model: the same weights and batches, run on each, and compared.

    report = verify(Request(engines=("fsdp2", "megatron"), layouts=("single", "tp2")), Lines())

Processes of their own run the engines; this one imports no torch.
"""

from __future__ import annotations

from engines.verifying.request import Request
from engines.verifying.results import Report
from engines.verifying.verify import verify

__all__ = ["Report", "Request", "verify"]
