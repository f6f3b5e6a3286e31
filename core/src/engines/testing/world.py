"""Persistent worlds: n real processes with an initialised default group, made once, used by many tests.

    def on_rank(x):                       # any function; it and what it uses travel by value
        return torch.distributed.get_rank() + x

    def test_something(world):
        assert world(2)(on_rank, 10) == [10, 11]

A call returns every rank's result. If a rank raises, `WorldError` carries the first traceback and the world is
replaced, since its other ranks may wait in a collective for ever.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from engines.devices import CPU, DeviceSpec
from engines.process import Owner
from engines.selection import Selection

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3", "qwen3_moe")),
    "engines.worker",
)
"""Imported once by the fork server, so that processes of a world start with them in memory. Installed modules only:
the server of Python 3.11 ignores sys.path, and passes over what it can't import without a word."""


class WorldError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class World:
    """`size` processes in one default group, each with a device of its own."""

    def __init__(
        self,
        size: int,
        device: DeviceSpec = CPU,
        *,
        start: Literal["forkserver", "spawn"] = "forkserver",
        path: Sequence[Path | str] = (),
        preload: Sequence[str] = (),
        setup: Callable[[], None] | None = None,
    ) -> None:
        """Processes start at the first call.

        `start`: multiprocessing's way; "spawn" begins with nothing imported. `path`: folders to look in first.
        `preload`: what the fork server imports beside `PRELOAD`; one server serves all worlds of a process, so that
        the first world's counts. `setup`: called in each process first.
        """
        self.size = size
        self.device = device
        self._start_by = start
        self._path = [str(folder) for folder in path]
        self._preload = (*PRELOAD, *preload)
        self._setup = setup
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        if not self._processes:
            self._start()
        module = sys.modules.get(function.__module__)
        if module is not None and not function.__module__.startswith(("engines", "torch")):
            cloudpickle.register_pickle_by_value(module)
        job = cloudpickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # of a process that died, as `_collect` will say
                pipe.send_bytes(job)
        return self._collect(timeout)

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._start_by)
        if self._start_by == "forkserver":
            context.set_forkserver_preload(list(self._preload))
        rendezvous = tempfile.mktemp(prefix="world-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.size, rendezvous, self.device, self._path, self._setup),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failure: str | None = None
        deadline = time.monotonic() + timeout
        while len(results) < self.size and failure is None:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.size)) - set(results))
                failure = f"ranks {missing} of {self.size} did not answer within {timeout} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(2)
                    ok, value = False, f"process died with exit code {self._processes[rank].exitcode}"
                if not ok:
                    failure = f"rank {rank} of {self.size}: {value}"
                    break
                results[rank] = value
        if failure is not None:
            self.close()
            raise WorldError(failure)
        return [results[rank] for rank in range(self.size)]


class Worlds:
    """The worlds of a session, each made when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, str, Owner | None, str | None], World] = {}

    def get(self, size: int, selection: Selection, setup: str | None = None) -> World:
        """A world of `size` processes for an engine; engines that don't mind share it."""
        alone = selection.process == "exclusive" or bool(selection.before)
        key = (size, selection.device, selection.owner if alone or setup else None, setup)
        if key not in self._worlds:
            self._worlds[key] = World(
                size,
                selection.device_spec,
                start="spawn" if alone else "forkserver",
                setup=partial(set_up, setup) if setup else None,
            )
        return self._worlds[key]

    def close(self) -> None:
        """End all processes."""
        for world in self._worlds.values():
            world.close()
        self._worlds = {}


def set_up(setup: str) -> None:
    """Call `package.module:function`."""
    module, _, name = setup.partition(":")
    getattr(importlib.import_module(module), name)()


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    device: DeviceSpec,
    path: Sequence[str],
    setup: Callable[[], None] | None,
) -> None:
    import datetime

    import torch

    from engines.device_services import DeviceServices

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    sys.path[:0] = path
    if setup is not None:
        setup()
    importlib.import_module(device.module)
    on_host = device.torch_device == "cpu"
    if not on_host:
        DeviceServices(torch.device(device.torch_device, rank)).select()
    torch.distributed.init_process_group(
        device.dist_backend if on_host else f"cpu:gloo,{device.torch_device}:{device.dist_backend}",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=100),
    )
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args, kwargs = pickle.loads(job)
            answer = (True, function(*args, **kwargs))
        except BaseException:  # noqa: BLE001 (it travels to the test)
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))
