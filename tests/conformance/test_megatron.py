"""Megatron-Core on the CPU, held to the whole contract at every layout."""

from __future__ import annotations

import pytest

from engines.testing import conformance

pytestmark = pytest.mark.more

megatron = conformance("megatron")
