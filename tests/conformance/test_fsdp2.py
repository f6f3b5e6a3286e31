"""FSDP2 on the CPU, held to the whole contract."""

from __future__ import annotations

from engines.testing import conformance

fsdp2 = conformance("fsdp2")
