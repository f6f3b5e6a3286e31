"""Workers of one process share the default process group that the first of them made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import torch.distributed as dist
from engines.losses import SFTLoss
from engines.worker import TrainingWorker
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches

def worker():
    made = TrainingWorker({"path": sys.argv[1]}, {"strategy": sys.argv[2], "device": "cpu"}, OPTIMIZER)
    made.initialize()
    return made

def loss(of):
    return of.train_mini_batch(pack(mini_batches()[0]), SFTLoss())["loss"]

first, second = worker(), worker()
first.close()
assert dist.is_initialized()
expected = loss(second)
second.close()
second.close()
assert not dist.is_initialized()
third = worker()
assert loss(third) == expected
third.close()
assert not dist.is_initialized()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
worker().close()
assert dist.is_initialized(), "it belongs to whoever made it"
"""


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron", marks=pytest.mark.more)])
def test_the_last_worker_ends_it(strategy, tmp_path):
    from engines.testing.tiny import tiny_folder

    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tiny_folder(tmp_path, "llama")), strategy],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
