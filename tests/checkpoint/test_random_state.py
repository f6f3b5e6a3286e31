"""Random generators go on where they were, through a checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import checkpoint
from engines.determinism import derive_seed, full_determinism, rng_state, seed_everything, set_rng_state
from support.checkpoints import save_whole

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = rng_state(CPU)
    yield
    set_rng_state(before, CPU)


def draws() -> list[float]:
    """Some of each generator; of normal numbers an odd count, since their second halves are kept for later."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


def test_numbers_continue_after_a_checkpoint(tmp_path: Path) -> None:
    seed_everything(5)
    draws()
    save_whole(tmp_path / "a", rank_state={"rng": rng_state(CPU)})
    expected = [draws(), draws()]
    seed_everything(6)
    saved = checkpoint.open(tmp_path / "a").rank_state(0)
    assert saved is not None
    assert set_rng_state(saved["rng"], CPU)
    assert [draws(), draws()] == expected


def test_the_state_of_another_kind_of_device_is_not_restored_and_said() -> None:
    assert not set_rng_state({**rng_state(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}, CPU)


def test_seeds_repeat_and_streams_differ() -> None:
    def seeded(seed: int, *parts: int | str) -> list[float]:
        seed_everything(seed, *parts)
        return draws()

    assert seeded(0) == seeded(0)
    streams = [seeded(0), seeded(1), seeded(0, "dropout"), seeded(0, "dropout", 1), seeded(0, "dropout", 2)]
    for kind in zip(*streams, strict=True):
        assert len(set(kind)) == len(streams)


def test_seeds_are_the_same_in_every_process() -> None:
    assert derive_seed(7) == 7
    assert derive_seed(0, "dropout", 1) == 2181139124358017667


def test_full_determinism_refuses_kernels_that_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "HCCL_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    try:
        full_determinism(CPU)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.empty(4).isnan().all(), "uninitialised memory is filled, so that reading it shows"
    finally:
        torch.use_deterministic_algorithms(False)
