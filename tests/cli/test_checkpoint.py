"""`engines checkpoint`: what it says about whole, damaged and unfinished checkpoints, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint import CheckpointStore
from engines.checkpoint_folder import checksum
from engines.cli.main import main
from support.checkpoints import save_whole
from support.commands import snapshot


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder with two checkpoints that are whole."""
    for step in (5, 20):
        save_whole(tmp_path / f"out/checkpoints/step-{step}", step=step)
    return tmp_path / "out"


TWICE = b'{"format": 1, '
"""Before a manifest's own "format"."""


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def say(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Exit code, and what was said on either stream."""
    code = main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_verify_takes_the_folder_at_any_level(out: Path, capsys: Any) -> None:
    before = snapshot(out)
    for path in (out, out / "checkpoints"):
        code, said = say(capsys, "verify", path)
        assert code == 0
        assert [line.split()[:2] for line in said.splitlines()] == [["step-5", "whole"], ["step-20", "whole"]]
    code, said = say(capsys, "verify", out / "checkpoints/step-5")
    assert (code, said.split()[:4]) == (0, ["step-5", "whole", "7", "files,"])
    assert snapshot(out) == before


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "manifest.json", "config.json"])
def test_verify_names_what_is_damaged(name: str, out: Path, capsys: Any) -> None:
    flip_a_bit(out / "checkpoints/step-5" / name)
    for path in (out, out / "checkpoints/step-5"):
        code, said = say(capsys, "verify", path)
        assert code == 1
        assert "step-5 " in said and "damaged" in said and f"{out}/checkpoints/step-5/{name}" in said
        assert ("step-20  whole" in said) == (path == out)
    assert say(capsys, "verify", out / "checkpoints/step-20")[0] == 0


def test_a_pipe_is_damage_and_not_waited_for(out: Path, capsys: Any) -> None:
    manifest = out / "checkpoints/step-5/manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    code, said = say(capsys, "verify", out / "checkpoints/step-5")
    assert (code, said.splitlines()[1]) == (1, f"  {manifest} is damaged: it is not a regular file")


def test_verify_mentions_what_was_never_finished(out: Path, capsys: Any) -> None:
    (out / "checkpoints/.step-30.tmp-0123abcd").mkdir()
    (out / "checkpoints/step-40").mkdir()
    (out / "checkpoints/step-40/state.json").touch()
    code, said = say(capsys, "verify", out)
    assert code == 0
    assert f"{out}/checkpoints/.step-30.tmp-0123abcd is being saved, or its save was interrupted" in said
    assert f"{out}/checkpoints/step-40 has no manifest.json: it was never finished" in said
    assert say(capsys, "verify", out / "checkpoints/step-40")[0] == 1, "this one was asked about"


def test_folders_without_checkpoints(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "new/checkpoints").mkdir(parents=True)
    assert say(capsys, "verify", tmp_path / "new") == (0, f"{tmp_path}/new holds no checkpoints yet\n")
    for command in ("verify", "list", "show"):
        code, said = say(capsys, command, tmp_path / "absent")
        assert (code, said) == (2, f"Error: there is no folder {tmp_path}/absent\n")
        assert say(capsys, command, tmp_path)[0] == 2
        code, said = say(capsys, command, "s3://bucket/out")
        assert code == 2 and "s3://bucket/out is a URL" in said
    save_whole(tmp_path / "new/checkpoints/step-20")
    code, said = say(capsys, "verify", tmp_path / "new/checkpoints/step-7")
    assert (code, said.splitlines()[1]) == (2, f"The latest complete one is {tmp_path}/new/checkpoints/step-20.")


def test_list(out: Path, capsys: Any) -> None:
    os.truncate(out / "checkpoints/step-20/index.json", 1)
    code, said = say(capsys, "list", out)
    heading, first, second, reason = said.splitlines()
    assert code == 0
    assert heading.split() == ["CHECKPOINT", "SAVED", "SIZE", "BY", "HOLDS", "STATUS"]
    assert first.split()[0] == "step-5" and first.endswith("fsdp2 on 1 cpu  model, optimizer, state  complete")
    assert second.endswith("damaged")
    assert reason.startswith(f"{out}/checkpoints/step-20/index.json has 1 bytes")
    os.utime(out / "checkpoints/step-5/manifest.json", (0, 0))  # as a copy may have it
    rows = json.loads(say(capsys, "list", "--json", out)[1])
    assert datetime.now() - datetime.fromisoformat(rows[0]["saved"]) < timedelta(minutes=5)
    assert [(row["step"], row["status"]) for row in rows] == [(5, "complete"), (20, "damaged")]
    assert rows[0]["holds"] == ["model", "optimizer", "state"]
    folder = out / "checkpoints/step-5"
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    assert rows[0]["size"] == sum(sizes.values()) - sizes[folder / "manifest.json"]


def test_show(out: Path, capsys: Any) -> None:
    code, said = say(capsys, "show", out)
    assert code == 0
    assert said.splitlines()[0].startswith(f"{out}/checkpoints/step-20: step 20, ")
    for words in ("by fsdp2 on cpu", "LlamaForCausalLM, a language model", "lr=0.001", "state.json"):
        assert words in said
    assert "each file has its size; verify compares checksums" in said
    shown = json.loads(say(capsys, "show", "--json", out / "checkpoints/step-5")[1])
    assert (shown["info"]["step"], shown["held"], shown["faults"]) == (5, ["model", "optimizer", "state"], [])


def test_show_tells_of_damage(out: Path, capsys: Any) -> None:
    step = out / "checkpoints/step-20"
    flip_a_bit(step / "index.json")
    code, said = say(capsys, "show", step)
    assert code == 0
    assert said.splitlines()[1].startswith(f"  status      damaged: {step}/index.json has changed")
    os.truncate(step / "model-00000-of-00001.safetensors", 9)
    lost = f"{step}/model-00000-of-00001.safetensors has 9 bytes"
    assert lost in json.loads(say(capsys, "show", "--json", step)[1])["faults"][1]
    (out / "checkpoints/step-30").mkdir()
    code, said = say(capsys, "show", out)
    assert code == 0 and f"{out}/checkpoints/step-5: step 5, " in said and f"step-20 is damaged: {lost}" in said
    assert "step-30 has no manifest.json: it was never finished" in said
    flip_a_bit(out / "checkpoints/step-5/manifest.json")
    code, said = say(capsys, "show", out)
    assert code == 2 and "holds no complete checkpoint\nstep-5 is damaged: " in said


def test_manifests_that_say_no_time(out: Path, capsys: Any) -> None:
    """Those of earlier versions."""
    file = out / "checkpoints/step-5/manifest.json"
    data = json.loads(file.read_bytes())
    del data["saved"], data["xxh3"]
    file.write_text(json.dumps({**data, "xxh3": checksum(data)}))
    os.utime(file, (1e9, 1e9))
    assert say(capsys, "verify", out)[0] == 0
    rows = json.loads(say(capsys, "list", "--json", out)[1])
    assert rows[0]["saved"] == datetime.fromtimestamp(1e9).isoformat(" ")


def test_they_import_no_torch(out: Path) -> None:
    script = (
        "import sys; from engines.cli.main import main; codes = [main(['checkpoint', *words.split(), sys.argv[1]])"
        " for words in ('list', 'list --json', 'show', 'show --json', 'verify')];"
        "print(codes, [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, out], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


def test_convert_refuses_before_it_reads(out: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "model"
    step = out / "checkpoints/step-20"
    code, said = say(capsys, "convert", out, target)
    assert code == 2 and f"Error: {out} holds checkpoints; name one of them" in said
    code, said = say(capsys, "convert", out / "checkpoints/step-7", target)
    assert code == 2 and f"Error: there is no checkpoint {out}/checkpoints/step-7" in said
    assert say(capsys, "convert", step, "s3://bucket/model")[0] == 2
    flip_a_bit(step / "model-00000-of-00001.safetensors")
    code, said = say(capsys, "convert", step, target)
    assert code == 2 and "model-00000-of-00001.safetensors has changed" in said
    assert not target.exists()
    target.mkdir()
    (target / "notes.txt").touch()
    code, said = say(capsys, "convert", step, target)
    assert code == 2 and f"{target} already holds something" in said
    for inside, around in {"step-30": "", "step-5/model": "step-5", ".x/y": ""}.items():
        code, said = say(capsys, "convert", step, out / "checkpoints" / inside)
        assert code == 2 and f"{inside} would lie in {out / 'checkpoints' / around}, where checkpoints alone" in said
    step.rename(tmp_path / "copied")
    code, said = say(capsys, "convert", tmp_path / "copied", tmp_path / "copied/model")
    assert code == 2 and f"would lie in {tmp_path}/copied, where" in said


@pytest.mark.parametrize("command", ["list", "show", "verify", "convert"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "must name a path"),
        ("a" * 300, "no file can be called that"),
        ("a/" * 3000, "no file can be called that"),
        ("a\0b", "no file can be called that"),
        ("~nobody0/out", "there is no user 'nobody0'"),
        ("s3://bucket/out", "is a URL"),
        ("loop", "loop"),
        ("recipe.yaml", "recipe.yaml is a file, not a folder"),
    ],
)
def test_paths_that_are_none(
    command: str, path: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "recipe.yaml").touch()
    before = snapshot(tmp_path)
    code, message = say(capsys, command, path, *(["model"] if command == "convert" else []))
    assert code == 2 and message.startswith("Error: ") and said in message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"[]", b"[" * 100_000, b'{"format": [1]}', TWICE, None])
def test_a_manifest_of_something_else(content: bytes | None, out: Path, capsys: Any) -> None:
    """Whatever it is, even a folder, it is named, and nothing else is wrong."""
    manifest = out / "checkpoints/step-20/manifest.json"
    held = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(content + held[1:] * (content == TWICE)) if content is not None else manifest.mkdir()
    code, message = say(capsys, "verify", out)
    assert code == 1
    assert "step-5   whole" in message and "step-20/manifest.json" in message
    assert list(CheckpointStore(out / "checkpoints").listing().damaged) == [manifest.parent]
    code, message = say(capsys, "show", manifest.parent)
    assert code == 2 and "manifest.json" in message
    assert say(capsys, "show", out)[1].startswith(f"{out}/checkpoints/step-5: step 5")


def test_what_may_not_be_read(out: Path) -> None:
    """A manifest, and the file of a shard, are damaged; a folder of checkpoints is the user's to mend."""
    unprivileged = Path(__file__).parent.parent / "support/unprivileged.py"

    def verify() -> tuple[int, str]:
        words = [sys.executable, unprivileged, sys.executable, "-m", "engines", "checkpoint", "verify", out]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    refused = [
        out / "checkpoints/step-5/model-00000-of-00001.safetensors",
        out / "checkpoints/step-20/manifest.json",
    ]
    for file in refused:
        file.chmod(0)
    code, said = verify()
    assert code == 1 and all(f"{file} can't be read: Permission denied" in said for file in refused)
    (out / "checkpoints").chmod(0)
    assert verify() == (2, f"Error: {out}/checkpoints can't be read or written: Permission denied\n")
    (out / "checkpoints").chmod(0o700)
