"""Arguments that no command can use: one message, exit code 2, and nothing is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.cli.main import main

CASES: list[tuple[list[str], str]] = [
    ([""], 'There is no command "".'),
    (["trian"], 'Did you mean "train"?'),
    (["--nope"], "No such option '--nope'"),
    (["train"], "Missing argument"),
    (["train", "trainer.steps=3"], "no recipe file is given, only overrides"),
    (["train", "recipe.yaml", "--trainer.steps=3"], "Overrides bear no dashes: trainer.steps=VALUE."),
    (["checkpoint", "lst", "out"], "Did you mean 'list'?"),
    (["checkpoint", "verify"], "Missing argument 'PATH'"),
    (["checkpoint", "list", "a", "b"], "unexpected extra argument (b)"),
    (["checkpoint", "list", "--jsn", "a"], "Did you mean '--json'?"),
    (["checkpoint", "convert", "a", "b", "--dtype", "f32"], "'f32' is not one of"),
    (["new"], "Missing argument 'NAME'"),
    (["new", ""], "can't name a backend"),
    (["new", "../x"], "can't name a backend"),
    (["new", "a" * 300], "64 in all at most"),
    (["new", "mychip\N{SUPERSCRIPT TWO}"], "can't name a backend"),
    (["new", "fsdp2"], '"fsdp2" is taken by engines-fsdp'),
    (["new", "mine", "--device", ""], "can't name a device"),
    (["why"], "Missing argument 'MODEL_TYPE'"),
    (["why", ""], "makes language_model"),
    (["why", "language_modl"], 'Did you mean "language_model"?'),
    (["why", "language_model", ""], '"" names no backend'),
    (["why", "language_model", "fsdp2@"], '"fsdp2@" names no backend'),
    (["why", "language_model", "@engines-fsdp"], '"@engines-fsdp" names no backend'),
    (["why", "language_model", "fsdp\N{SUPERSCRIPT TWO}"], 'Did you mean "fsdp2"?'),
    (["why", "language_model", "fsdp2", "--device", "cpuu"], 'Did you mean "cpu"?'),
    (["verify", "--engine", "nope"], 'No installed engine has the backend "nope"'),
    (["verify", "--against", "nope"], 'No installed engine has the backend "nope"'),
    (["verify", "--device", "nope"], 'device "nope", which nobody describes'),
    (["verify", "--device", "gpu"], 'Did you mean "cuda"?'),
    (["verify", "--steps", "0"], "Invalid value for '--steps'"),
    (["verify", "--steps", "nan"], "Invalid value for '--steps'"),
    (["verify", "--steps", "9" * 30], "Invalid value for '--steps'"),
    (["verify", "--html", ""], "--html: . is a folder"),
    (["verify", "--html", "/proc/page.html"], "--html: /proc/page.html can't be written: "),
    (["verify", "--html", "a" * 300], "can't be written: File name too long"),
    (["schema", "recip"], 'Did you mean "recipe"?'),
    (["show", ""], 'No installed engine has the backend ""'),
    (["list", "--can", "nope"], '"nope" is not a capability'),
    (["doctor", "x"], "unexpected extra argument (x)"),
]


@pytest.mark.parametrize(("words", "said"), CASES, ids=[" ".join(words)[:40] for words, _ in CASES])
def test_they_are_refused(words: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINES_DEVICE", raising=False)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
