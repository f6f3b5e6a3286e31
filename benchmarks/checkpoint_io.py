"""Checkpoints and exports against writing and reading the same bytes raw.

A llama of about 90M parameters on fsdp2, one process: 1 GB of float32 weights and optimizer state. Raw is Python's
`write` with fsync, and `readinto` memory that is there. Both sides include the disk: before each read the files'
pages are dropped from the cache. Checksums (xxh3_128) are taken of all bytes on every save and load. Sides take
turns, and of each its best time counts, since other work on a machine only adds to it. Of saves in the background
the first is shown apart: it also makes the memory that later ones reuse.

Goals: save and load at 0.7 of raw; a save in the background blocks training for 0.1 of a synchronous one; an export
takes one bucket of memory, and its largest tensor twice.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_io.py [--repeats N] [--folder DIR] [--check]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from support.memory import keep_nothing_freed, peak, reset_peak
from support.workload import OPTIMIZER, model_folder

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.weights import write_pretrained
from engines.worker import TrainingWorker

GOAL_OF_RAW, GOAL_BLOCKED = 0.7, 0.1
BUCKET = 100 * 2**20
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 4}
GB = 1e9


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Drop the pages of all files in a folder from the cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_raw(folder: Path, contents: dict[str, bytes]) -> None:
    """The bytes of a checkpoint, as files."""
    folder.mkdir()
    for name, data in contents.items():
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_raw(folder: Path, memory: bytearray) -> None:
    """All files, into memory that is there already, as the model's is when a run is resumed."""
    free = memoryview(memory)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(free):
                free = free[read:]


def one_step(worker: TrainingWorker) -> None:
    """So that the optimizer has state."""
    ids = torch.arange(64)
    worker.train_mini_batch(Batch.from_sequences([{"input_ids": ids, "loss_mask": ids >= 0}]), SFTLoss())


class Measured:
    """Seconds of each kind, by repeat."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[float]] = {}

    def time(self, kind: str, run: Callable[[], object]) -> None:
        self.by_kind.setdefault(kind, []).append(seconds(run))

    def best(self, kind: str) -> float:
        return min(self.by_kind[kind])


def measure_io(worker: TrainingWorker, root: Path, repeats: int) -> tuple[Measured, float]:
    """Saves and loads against raw ones, and the size of a checkpoint in bytes."""
    worker.save_checkpoint(root / "first")
    contents = {path.name: path.read_bytes() for path in (root / "first").iterdir()}
    memory = bytearray(b"1") * (sum(map(len, contents.values())) + 1)
    measured = Measured()
    for repeat in range(repeats):
        for name in ("raw", "saved", "background"):
            shutil.rmtree(root / name, ignore_errors=True)
        sides = [
            ("write raw", lambda: write_raw(root / "raw", contents)),
            ("save", lambda: worker.save_checkpoint(root / "saved")),
        ]
        for kind, run in sides[:: 1 if repeat % 2 else -1]:
            os.sync()
            measured.time(kind, run)
        os.sync()
        measured.time(
            "blocked" if repeat else "blocked, first",
            lambda: worker.save_checkpoint(root / "background", background=True),
        )
        measured.time("in the background", worker.engine.finish_saving)
        sides = [
            ("read raw", lambda: read_raw(root / "raw", memory)),
            ("load", lambda: worker.load_checkpoint(root / "saved")),
        ]
        for kind, run in sides[:: 1 if repeat % 2 else -1]:
            for name in ("raw", "saved"):
                forget(root / name)
            measured.time(kind, run)
    return measured, sum(map(len, contents.values()))


def measure_export(worker: TrainingWorker, root: Path) -> tuple[float, int, int]:
    """Seconds, peak of memory beyond what was there, and the bytes of the largest tensor."""
    largest = max(tensor.nbytes for _, tensor in worker.engine.get_per_tensor_param()[0])

    def export(name: str) -> None:
        stream, _ = worker.engine.get_per_tensor_param()
        source = worker.engine.model_files
        write_pretrained(
            stream,
            source=source,
            target=root / name,
            dtype=torch.float32,
            is_writer=True,
            max_shard_bytes=BUCKET,
        )

    export("warm-up")
    # so that its pages serve the next one: fresh ones are slow in virtual machines
    shutil.rmtree(root / "warm-up")
    keep_nothing_freed()
    reset_peak()
    before = peak()
    took = seconds(lambda: export("export"))
    return took, peak() - before, largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="at least 2")
    parser.add_argument("--folder", type=Path, help="write below this folder; default: a temporary one")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    arguments = parser.parse_args()
    with model_folder(**SIZES) as model, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        with TrainingWorker({"path": str(model)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker:
            worker.initialize()
            one_step(worker)
            measured, size = measure_io(worker, root, arguments.repeats)
            exported, extra, largest = measure_export(worker, root)
        export_size = sum(path.stat().st_size for path in (root / "export").iterdir())
    save, load = (
        measured.best(f"{raw} raw") / measured.best(ours) for raw, ours in (("write", "save"), ("read", "load"))
    )
    blocked, first = (measured.best(kind) / measured.best("save") for kind in ("blocked", "blocked, first"))
    print(f"{f'{size / GB:.2f} GB, best of {arguments.repeats}':<26}{'seconds':>10}{'GB/s':>8}")
    for kind in measured.by_kind:
        print(f"{kind:<26}{measured.best(kind):>10.3f}{size / GB / measured.best(kind):>8.2f}")
    print(f"{'export':<26}{exported:>10.3f}{export_size / GB / exported:>8.2f}")
    print(f"of raw: save {save:.2f}, load {load:.2f}; goal: at least {GOAL_OF_RAW}")
    print(f"blocked of a save: {blocked:.3f}, the first time {first:.3f}; goal: at most {GOAL_BLOCKED}")
    limit, mib = BUCKET + 2 * largest, 2**20
    print(f"export's extra memory: {extra / mib:.0f} MiB; goal: at most {limit / mib:.0f}, a bucket and two tensors")
    missed = min(save, load) < GOAL_OF_RAW or blocked > GOAL_BLOCKED or extra > limit * 1.1
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
