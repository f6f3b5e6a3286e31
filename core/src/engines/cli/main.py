"""The entry of every command: finds it, runs it, and turns what it raises into a message and an exit code.

    0    done
    1    a failure that is not the user's; `doctor`: something is broken
    2    something that the user must mend: one message
    129  SIGHUP, while training
    130  Ctrl-C
    143  SIGTERM

A traceback is shown only with `--traceback`, which may stand anywhere on the command line.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from engines.errors import EnginesError, did_you_mean

COMMANDS = {
    "list": ("engines.cli.listing:list_engines", "Which engines are installed, and which can run here."),
    "show": ("engines.cli.showing:show", "Everything about one engine."),
    "why": ("engines.cli.why:why", "Which engine a backend means here, and why."),
    "doctor": ("engines.cli.doctor:doctor", "Find what is broken among the installed plugins."),
    "schema": ("engines.cli.schema:schema", "JSON Schema of the manifest, a recipe or an engine's settings."),
    "checkpoint": ("engines.cli.checkpoint:checkpoint", "List, show, verify and convert checkpoints."),
    "train": ("engines.cli.train:train", "Train as a recipe says."),
    "verify": ("engines.cli.verify:verify", "Find out whether installed engines train the same model."),
    "new": ("engines.cli.new:new", "Begin a plugin, which passes the conformance kit as it is."),
}
"""Name, where the command is, and its line of help; nothing is imported until it is called."""

FAILED, MEND, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class Terminated(BaseException):
    """SIGTERM has arrived."""


class LazyGroup(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f'There is no command "{args[0]}".{did_you_mean(args[0], COMMANDS)}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib_metadata import version

        click.echo(f"engines-core {version('engines-core')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="The version."
)
@click.option("--traceback", is_flag=True, expose_value=False, help="Show where an error comes from.")
def engines() -> None:
    """LLM post-training on any training backend, chosen by one word."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A command returns None for 0, or the code itself."""
    words = list(sys.argv[1:] if args is None else args)
    traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        with _sigterm_raises():
            code = engines.main(words, prog_name="engines", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return MEND
    except (EnginesError, PermissionError) as error:
        return _fail(MEND, _words(error), traceback)
    except (click.Abort, KeyboardInterrupt):
        return _fail(INTERRUPTED, "interrupted", traceback)
    except Terminated:
        return _fail(TERMINATED, "terminated", traceback)
    except Exception as error:  # noqa: BLE001 (the last door: whatever it is becomes exit code 1)
        hint = "" if traceback else " (--traceback shows where)"
        return _fail(FAILED, f"{type(error).__name__}: {error}{hint}", traceback)


def _words(error: EnginesError | PermissionError) -> str:
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename} can't be read or written: {error.strerror}"
    return str(error)


def _fail(code: int, message: str, traceback: bool) -> int:
    if traceback:
        from traceback import print_exc

        print_exc()
    click.echo(f"{click.style('Error', fg='red')}: {message}", err=True)
    return code


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that files are closed and children ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
