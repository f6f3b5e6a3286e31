"""Calls into MindSpeed: they parse this program's `sys.argv`, exit, and raise whatever comes up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engines.errors import LaunchError

Result = TypeVar("Result")
FRESH = "What MindSpeed patched until then stays patched: mend the cause and start a fresh process."


def call(what: str, function: Callable[[], Result]) -> Result:
    """What `function` returns, having seen a command line without arguments. `what` it does, for the error.

    Raises `LaunchError` for an exception or an exit.
    """
    try:
        with _bare_command_line():
            return function()
    except SystemExit as error:
        raise LaunchError(f"{what} ended the program with SystemExit({error.code!r}).", FRESH) from error
    except Exception as error:
        raise LaunchError(f"{what} raised {type(error).__name__}: {error}", FRESH) from error


@contextmanager
def _bare_command_line() -> Iterator[None]:
    words = sys.argv
    sys.argv = words[:1]
    try:
        yield
    finally:
        sys.argv = words
