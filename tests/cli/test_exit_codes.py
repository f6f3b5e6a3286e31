"""Every command ends with a code and one message, whatever happens inside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from engines.cli import main as cli
from engines.errors import ConfigError

WORKS: dict[str, tuple[str, str]] = dict(cli.COMMANDS)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> type[Behaviour]:
    """The command `test`, which does what `Behaviour.what` says."""
    monkeypatch.setitem(cli.COMMANDS, "test", ("behaviour:behave", ""))
    monkeypatch.setitem(sys.modules, "behaviour", Behaviour)
    return Behaviour


class Behaviour:
    """Stands for a command's module."""

    raises: BaseException | None = None
    returns: int | None = None

    @staticmethod
    @click.command
    @click.option("--number", type=int)
    def behave(number: int | None) -> int | None:
        if Behaviour.raises is not None:
            raise Behaviour.raises
        return Behaviour.returns


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ConfigError("clip_grad is 0", "Make it positive."), 2, "Error: clip_grad is 0\nMake it positive.\n"),
        (RuntimeError("odd"), 1, "Error: RuntimeError: odd (--traceback shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (cli.Terminated(), 143, "Error: terminated\n"),
        (None, 0, ""),
    ],
)
def test_codes(
    command: type[Behaviour],
    capsys: pytest.CaptureFixture[str],
    raised: BaseException | None,
    code: int,
    message: str,
) -> None:
    command.raises, command.returns = raised, None
    assert cli.main(["test"]) == code
    said = capsys.readouterr()
    assert said.err.endswith(message)
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_command_may_return_its_code(command: type[Behaviour]) -> None:
    command.raises, command.returns = None, 7
    assert cli.main(["test"]) == 7


@pytest.mark.parametrize("words", [["--traceback", "test"], ["test", "--traceback"]])
def test_a_traceback_is_there_for_the_asking(
    command: type[Behaviour], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    command.raises = ConfigError("wrong")
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.endswith("Error: wrong\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lits"], 'There is no command "lits". Did you mean "list"?'),
        (["frobnicate"], 'There is no command "frobnicate".'),
        (["test", "--number", "many"], "'many' is not a valid integer"),
        (["test", "--nummer", "1"], "No such option"),
        (["--verbose"], "No such option"),
        (["test", "more"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_2(
    command: type[Behaviour], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_real_signals(tmp_path: Path, signum: int, code: int) -> None:
    ready = tmp_path / "ready"
    program = f"""
import pathlib, signal, sys, time, types, click
from engines.cli import main as cli

# As in a terminal: a job in the background begins with Ctrl-C ignored.
signal.signal({int(signum)}, signal.default_int_handler if {signum == signal.SIGINT} else signal.SIG_DFL)

@click.command
def wait():
    try:
        pathlib.Path({str(ready)!r}).touch()
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

sys.modules["waiting"] = types.SimpleNamespace(wait=wait)
cli.COMMANDS["wait"] = ("waiting:wait", "")
sys.exit(cli.main(["wait"]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signum)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert out == "cleaned up\n"
    assert "Traceback" not in err


def test_help_imports_no_command() -> None:
    code = "import sys; from engines.cli.main import main; main(['--help'])"
    code += "; print([name for name in sys.modules if 'engines' in name])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "['engines', 'engines.cli', 'engines.errors', 'engines.cli.main']"
    assert all(name in ended.stdout for name in WORKS)


def test_the_version() -> None:
    ended = subprocess.run([sys.executable, "-m", "engines", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("engines-core ")
