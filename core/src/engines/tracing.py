"""A wrapper that writes what an engine does, and when, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Registered only when asked for (`trainer.trace`, `Engine.wrap`): what is off is not there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engines.contract import MicroResult, StepResult, hookimpl
from engines.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from engines.batch import Batch


class ChromeTracer:
    """Times each pass, micro-batch forward and optimizer step of one engine on this rank.

    Times are wall-clock microseconds of the host; on an accelerator a forward ends when it is queued, not when
    it has run. Events are written as they end, in the JSON array format, whose closing bracket is optional: a
    killed run leaves a trace that opens. Raises `ConfigError` where the trace can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0) -> None:
        self._rank, self._path = rank, Path(path)
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self._path.open("w", encoding="utf-8")
            self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}"}})

    @hookimpl(wrapper=True)
    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], forward_only: bool
    ) -> Generator[None, list[MicroResult] | None, list[MicroResult] | None]:
        """One pass over a replica's micro-batches."""
        start = time.perf_counter_ns()
        result = yield
        name = "infer" if forward_only else "forward_backward"
        self._event(name, start, micro_batches=len(micro_batches), tokens=sum(b.num_tokens for b in micro_batches))
        with self._writing():
            self._file.flush()
        return result

    @hookimpl(wrapper=True)
    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> Generator[None, Any, Any]:
        """One forward of one micro-batch through one model chunk."""
        start = time.perf_counter_ns()
        result = yield
        self._event(
            f"micro-batch {index}",
            start,
            chunk=chunk_index,
            sequences=len(micro_batch),
            tokens=micro_batch.num_tokens,
            filler=micro_batch.is_filler,
        )
        return result

    @hookimpl(wrapper=True)
    def step(self) -> Generator[None, StepResult, StepResult]:
        """One optimizer step."""
        start = time.perf_counter_ns()
        result = yield
        self._event("step", start, grad_norm=repr(result.grad_norm), lr=result.lr, skipped=result.skipped)
        return result

    @hookimpl(wrapper=True)
    def close(self) -> Generator[None, None, None]:
        """The trace ends with the engine."""
        try:
            yield
        finally:
            self._write({"name": "end", "ph": "M", "args": {}}, last=True)
            with self._writing():
                self._file.close()

    def _event(self, name: str, start_ns: int, **args: Any) -> None:
        end = time.perf_counter_ns()
        self._write({"name": name, "ph": "X", "ts": start_ns / 1e3, "dur": (end - start_ns) / 1e3, "args": args})

    def _write(self, event: dict[str, Any], *, last: bool = False) -> None:
        with self._writing():
            self._file.write(json.dumps({**event, "pid": self._rank, "tid": 0}) + ("\n]\n" if last else ",\n"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the trace {self._path} can't be written: {error.strerror}",
                "Make room, or run without it (trainer.trace).",
            ) from error
