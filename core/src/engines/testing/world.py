"""Persistent worlds: n real processes with an initialised default group, made once, used by many tests.

    def on_rank(x):                       # any function; it and what it uses travel by value
        return torch.distributed.get_rank() + x

    def test_something(world):
        assert world(2)(on_rank, 10) == [10, 11]

A call returns every rank's result. If a rank raises, `WorldError` carries the first cause and the world is replaced,
since its other ranks may wait in a collective for ever.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing.util
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from engines.devices import CPU, DeviceSpec
from engines.launch.reports import Death, Report, first_cause
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

GRACE_S = 1.0
"""How long the others may still say what was the matter, when a rank has died or has lost its peers."""


class WorldError(AssertionError):
    """A rank raised, died, or did not answer in time."""

    def __init__(self, message: str, cause: Report | Death | None = None, last_words: str = "") -> None:
        """`cause`: None where ranks were silent. `last_words`: the last line that the rank wrote, if it is kept."""
        super().__init__(message)
        self.cause = cause
        self.last_words = last_words


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
        log: Path | None = None,
    ) -> None:
        """Processes start at the first call.

        `start`: multiprocessing's way; "spawn" begins with nothing imported. `path`: folders to look in first.
        `preload`: what the fork server imports beside `PRELOAD`; one server serves all worlds of a process, so that
        the first world's counts. `setup`: called in each process first. `log`: files `log`-0, `log`-1, ... take what
        the ranks write to standard output and error; None: it goes where that of this process goes.
        """
        self.size = size
        self.device = device
        self._start_by = start
        self._path = [str(folder) for folder in path]
        self._preload = (*PRELOAD, *preload)
        self._setup = setup
        self._log = log
        self._rendezvous = ""
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
        for rank, process in enumerate(self._processes):
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            Path(_stack_file(self._rendezvous, rank)).unlink(missing_ok=True)
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._start_by)
        if self._start_by == "forkserver":
            context.set_forkserver_preload(list(self._preload))
        self._rendezvous = rendezvous = tempfile.mktemp(prefix="world-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.size, rendezvous, self.device, self._path, self._setup, self._log_of(rank)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        reports: list[Report] = []
        deaths: list[Death] = []
        silent = set(range(self.size))
        deadline = time.monotonic() + timeout
        while silent and (ready := self._answering(silent, deadline)):
            for rank in ready:
                silent.remove(rank)
                match self._receive(rank):
                    case Report() as report:
                        reports.append(report)
                    case Death() as death:
                        deaths.append(death)
                    case (value,):
                        results[rank] = value
            if any(report.kind != "peer" for report in reports):
                break
            if reports or deaths:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) < self.size:
            error = self._error(reports, deaths, sorted(silent), f"within {timeout:g} s")
            self.close()
            raise error
        return [results[rank] for rank in range(self.size)]

    def _answering(self, ranks: Iterable[int], deadline: float) -> list[int]:
        """Those of `ranks` that have something to say; none when the time is up."""
        pipes: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        return [pipes[pipe] for pipe in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))]

    def _receive(self, rank: int) -> Report | Death | tuple[Any]:
        """What a rank returned, alone in a tuple, or what became of it."""
        try:
            answer: Report | tuple[Any] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(2)
            return Death(rank, self._processes[rank].exitcode or 0)
        return answer

    def _error(
        self, reports: Sequence[Report], deaths: Sequence[Death], silent: list[int], within: str
    ) -> WorldError:
        if not reports and not deaths:
            where = "\n".join(f"rank {rank} {self._whereabouts(rank)}" for rank in silent)
            return WorldError(f"ranks {silent} of {self.size} did not answer {within}\n{where}")
        cause = first_cause(reports, deaths)
        log = self._log_of(cause.rank)
        words = log.read_text(errors="replace").strip().splitlines()[-1:] if log is not None and log.exists() else []
        said = f"rank {cause.rank} of {self.size}: {cause.traceback}" if isinstance(cause, Report) else str(cause)
        return WorldError(said, cause, *words)

    def _whereabouts(self, rank: int) -> str:
        """Where a rank that doesn't answer stands: in its own code, and in what that called."""
        stack = Path(_stack_file(self._rendezvous, rank))
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not (stack.exists() and stack.read_text().strip()):
            time.sleep(0.05)
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack.read_text() if stack.exists() else "")
        if not frames:
            return "doesn't say where it stands"
        file, line, function = next((one for one in frames if f"{os.sep}torch{os.sep}" not in one[0]), frames[0])
        return f"stands in {file}:{line}, in {function}, which waits in {frames[0][2]}"

    def _log_of(self, rank: int) -> Path | None:
        return Path(f"{self._log}-{rank}") if self._log is not None else None


class Worlds:
    """The worlds of a session, each made when it is first asked for."""

    def __init__(self, logs: Path | None = None) -> None:
        """`logs`: a folder for what the ranks write to standard output and error, see `World`."""
        self._worlds: dict[tuple[int, str, Owner | None, str | None], World] = {}
        self._logs = logs

    def get(self, size: int, selection: Selection, setup: str | None = None) -> World:
        """A world of `size` processes for an engine; engines that don't mind share it."""
        alone = selection.process == "exclusive" or bool(selection.before)
        key = (size, selection.device, selection.owner if alone else None, setup)
        if key not in self._worlds:
            self._worlds[key] = World(
                size,
                selection.device_spec,
                start="spawn" if alone else "forkserver",
                setup=partial(set_up, setup) if setup else None,
                log=self._logs / f"world-{len(self._worlds)}" if self._logs is not None else None,
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


def _stack_file(rendezvous: str, rank: int) -> str:
    """Where a rank writes what it is doing, when it is sent SIGUSR1."""
    return f"{rendezvous}-{rank}"


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    device: DeviceSpec,
    path: Sequence[str],
    setup: Callable[[], None] | None,
    log: Path | None,
) -> None:
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)

    faulthandler.register(signal.SIGUSR1, open(_stack_file(rendezvous, rank), "w"), all_threads=False)  # noqa: SIM115

    import datetime

    import torch

    from engines.determinism import DETERMINISTIC_ENV
    from engines.device_services import DeviceServices

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    # torch keeps a record of the last 2000 collectives; while that fills it looks like a leak
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    torch.set_num_threads(1)
    sys.path[:0] = path
    if setup is not None:
        setup()
    importlib.import_module(device.module)
    on_host = device.torch_device == "cpu"
    if not on_host:
        os.environ |= DETERMINISTIC_ENV  # read when the device is first used, which a deterministic run may not be
        DeviceServices(torch.device(device.torch_device, rank)).select()
    torch.distributed.init_process_group(
        device.dist_backend if on_host else f"cpu:gloo,{device.torch_device}:{device.dist_backend}",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=100),
    )
    # What is imported by now stays: to look through it again takes most of the time of an engine's `close`.
    gc.freeze()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            # Not the interpreter's whole end, which groups of gloo may hang; but semaphores, of which tqdm makes one,
            # are given back, or multiprocessing warns of them.
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            os._exit(0)
        answer: Report | tuple[Any]
        try:
            function, args, kwargs = pickle.loads(job)
            answer = (function(*args, **kwargs),)
        except BaseException as error:  # noqa: BLE001 (it travels to the caller)
            answer = Report.of(error, rank)
        pipe.send_bytes(cloudpickle.dumps(answer))
