"""What nobody would type on purpose: wrong encodings, folders for files, loops of links, files of something else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.cli.main import main
from support.commands import recipe, run, snapshot
from support.spoiling import Prepare, clear, put

Row = tuple[Prepare, list[str], list[str]]


def add(text: str) -> Prepare:
    """At the end of the recipe."""
    return lambda work: (work / "recipe.yaml").open("a").write(text)


def folder(name: str) -> Prepare:
    def prepare(work: Path) -> None:
        clear(work / name)
        (work / name).mkdir(parents=True)

    return prepare


def link(name: str, target: str) -> Prepare:
    def prepare(work: Path) -> None:
        clear(work / name)
        (work / name).symlink_to(target)

    return prepare


def edit_header(change: Callable[[dict[str, Any]], object]) -> Prepare:
    """Of the weights."""

    def prepare(work: Path) -> None:
        file = work / "model" / "model.safetensors"
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return prepare


def shards(homes: Any) -> Prepare:
    """An index in place of the weights."""

    def prepare(work: Path) -> None:
        (work / "model" / "model.safetensors").unlink()
        put("model/model.safetensors.index.json", json.dumps({"weight_map": homes}))(work)

    return prepare


def parquet(**columns: Any) -> Prepare:
    def prepare(work: Path) -> None:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), work / "data.parquet")

    return prepare


def nanoseconds(work: Path) -> None:
    import pyarrow

    parquet(text=pyarrow.array([1], pyarrow.timestamp("ns")))(work)


def column_twice(work: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, work / "data.parquet")


def nothing(work: Path) -> None: ...


def record(**fields: Any) -> Prepare:
    return put("data.jsonl", json.dumps(fields))


PARQUET = ["data.train=data.parquet"]
DEEP, LONG = "[" * 100_000, "a" * 300
YAML: dict[str, Row] = {
    "not UTF-8": (put("recipe.yaml", "recipe: sft".encode("utf-16")), [], ["recipe.yaml is not YAML", "utf-8"]),
    "a folder": (folder("recipe.yaml"), [], ["recipe.yaml is a folder, not a recipe file"]),
    "a loop of links": (link("recipe.yaml", "recipe.yaml"), [], ["there is no recipe file recipe.yaml"]),
    "a tab": (put("recipe.yaml", "recipe: sft\nmodel:\n\tpath: a\n"), [], ["recipe.yaml is not YAML", "line 3"]),
    "a key twice": (add("\nrecipe: sft\n"), [], ["recipe.yaml, line 16: recipe stands twice, first in line 10"]),
    "a key twice in a section": (nothing, ["trainer={steps: 1, steps: 2}"], ["}: steps stands twice\n"]),
    "a word for a list": (nothing, ["trainer.loggers=tensorboard"], ["trainer.loggers: ", "Write [tensorboard]."]),
    "numbers for a list": (nothing, ["optimizer.betas=0.9,0.95"], ["optimizer.betas: ", "Write [0.9,0.95]."]),
    "a leading zero": (add("\nlaunch:\n  nproc: 010\n"), [], ["launch.nproc: 010 begins with a zero", "Write 10"]),
    "an alias of itself": (add("\nx: &x [*x]\n"), [], ["x.0 repeats aliases without end"]),
    "a key with dots": (
        add("\ntrainer.steps: 2\n"),
        [],
        ["trainer.steps: only overrides", "write trainer: {steps: ...}."],
    ),
    "a number alone": (put("recipe.yaml", "5"), [], ["recipe.yaml holds a number, not the keys"]),
    "no key": (add("\n~: 2\n"), [], ["recipe.yaml: Incompatible key type 'NoneType'"]),
    "an alias of nothing": (add("\nx: *nope\n"), [], ["found undefined alias"]),
    "code": (add("\nx: !!python/object/apply:os.system ['touch ran']\n"), [], ["could not determine a constructor"]),
    "a number of many digits": (nothing, [f"trainer.steps={'9' * 5000}"], ["trainer.steps=999", "digits"]),
    "in a file": (add(f"\nx: {'9' * 5000}\n"), [], ["recipe.yaml is not YAML", "digits"]),
    "a list for a section": (nothing, ["model=[1]"], ["model=[1]: a list and keys of one's own can't be laid"]),
    "a word for a section": (nothing, ["trainer=3"], ["trainer: must hold keys of its own, got 3"]),
    "a quote": (nothing, ["trainer.steps='3"], ["trainer.steps='3: ", "spelt KEY=VALUE"]),
    "itself": (nothing, ["trainer.output_dir=${trainer.output_dir}"], ["Recursive interpolation"]),
    "an absent variable": (nothing, ["trainer.output_dir=${oc.env:ENGINES_ABSENT}"], ["'ENGINES_ABSENT' not found"]),
}
PATHS: dict[str, Row] = {
    **{
        f"empty {key}": (nothing, [f"{key}=''"], [f"{key}: must name a path, got ''"])
        for key in ("model.path", "data.train", "trainer.output_dir", "trainer.resume")
    },
    **{
        f"too long {key}": (nothing, [f"{key}=a/{LONG}/b"], [f"{key}: no file can be called that"])
        for key in ("model.path", "data.eval", "trainer.output_dir", "trainer.resume")
    },
    "too long in all": (nothing, [f"model.path={'a/' * 3000}"], ["model.path: no file can be called that"]),
    "a zero": (
        put("b.yaml", 'trainer: {output_dir: "a\\0b"}'),
        ["b.yaml"],
        ["output_dir: no file can be called that"],
    ),
    "nobody's home": (nothing, ["trainer.output_dir=~nobody0/x"], ["trainer.output_dir: there is no user 'nobody0'"]),
    "no strategy": (nothing, ["engine.strategy=''"], ['"" names no backend']),
    "no device": (nothing, ["engine.device=''"], ["engine.device: string should have at least 1 character"]),
    "output a loop": (link("out", "out"), [], ["trainer.output_dir: ", "out is a link that leads nowhere"]),
    "output leads nowhere": (link("out", "absent/out"), [], ["out is a link that leads nowhere"]),
    "a folder for metrics": (
        folder("out/metrics.jsonl"),
        [],
        ["metrics.jsonl is a folder, where the run would write"],
    ),
    "a file for checkpoints": (put("out/checkpoints", ""), [], ["checkpoints is a file, where the run would make"]),
    "a finished run of how many": (
        put("out/run.json", '{"finished": true, "steps": "x"}'),
        [],
        ["run.json is damaged: it names no number of steps"],
    ),
    "output among checkpoints": (
        folder("earlier/checkpoints/step-5"),
        ["trainer.output_dir=earlier/checkpoints/new"],
        ["earlier/checkpoints/new is, or lies in, ", "/earlier/checkpoints, where checkpoints alone do"],
    ),
    "a lock that is a folder": (folder("out/.lock"), [], ["out can't be written: Is a directory"]),
}
MODELS: dict[str, Row] = {
    "config UTF-16": (put("model/config.json", "{}".encode("utf-16")), [], ["config.json is not JSON", "utf-8"]),
    "config with a mark": (put("model/config.json", b"\xef\xbb\xbf{}"), [], ["config.json is not JSON", "BOM"]),
    "config without end": (put("model/config.json", DEEP), [], ["config.json is not JSON", "recursion"]),
    "config of many digits": (put("model/config.json", f'{{"a": {"9" * 5000}}}'), [], ["is not JSON", "digits"]),
    "config a list": (put("model/config.json", "[]"), [], ["config.json holds list, not an object"]),
    "config a folder": (folder("model/config.json"), [], ["holds no config.json"]),
    "a file": (put("model", ""), [], ["model.path: there is no folder"]),
    "a loop of links": (link("model", "model"), [], ["model.path: there is no folder"]),
    "weights a pointer of git-lfs": (put("model/model.safetensors", "version https://git-lfs"), [], ["is truncated"]),
    "weights with something behind": (
        lambda work: (work / "model/model.safetensors").open("ab").write(b"x"),
        [],
        ["model.safetensors is truncated, or not a safetensors file", "not fully covered"],
    ),
    "weights of an unknown kind": (
        edit_header(lambda header: header["lm_head.weight"].update(dtype="F128")),
        [],
        ["model.safetensors is truncated, or not a safetensors file", "F128"],
    ),
    "index of numbers": (shards({"a": 5}), [], ["model/5 is missing; model.safetensors.index.json names it"]),
    "index leads out": (shards({"a": "../../x"}), [], ["../../x is missing"]),
    "index a list": (shards([]), [], ["model.safetensors.index.json has no weight_map"]),
}
DATA: dict[str, Row] = {
    "UTF-16": (put("data.jsonl", '{"text": "a"}'.encode("utf-16")), [], ["line 1: not UTF-8"]),
    "Latin-1": (put("data.jsonl", b'{"text": "a"}\n{"text": "\xe9"}'), [], ["line 2: not UTF-8"]),
    "gzip": (put("data.jsonl", gzip.compress(b"{}")), [], ["line 1: not UTF-8"]),
    "carriage returns": (put("data.jsonl", '{"text": "a"}\r{"text": "b"}\r'), [], ["line 1: broken JSON"]),
    "over lines": (put("data.jsonl", '{\n"text": "a"\n}'), [], ["line 1: broken JSON"]),
    "without end": (put("data.jsonl", DEEP), [], ["line 1: broken JSON", "recursion"]),
    "blank": (put("data.jsonl", "\n \n"), [], ["data.jsonl holds no records"]),
    "a folder": (folder("data.jsonl"), [], ["data.jsonl is a folder, not a data file"]),
    "JSON": (put("data.json", "[]"), ["data.train=data.json"], ["data files are .jsonl or .parquet"]),
    "id null": (record(input_ids=[1, None]), [], ["line 1: input_ids[1] must be an integer, got null"]),
    "id true": (record(input_ids=[True]), [], ["line 1: input_ids[0] must be an integer, got true"]),
    "id negative": (record(input_ids=[1, -1]), [], ["line 1: input_ids[1] is -1, outside the model's vocabulary"]),
    "mask short": (
        record(input_ids=[1, 2], loss_mask=[1]),
        [],
        ["loss_mask must be as long as input_ids, 2, but is 1"],
    ),
    "mask nested": (record(input_ids=[1], loss_mask=[[1]]), [], ["loss_mask[0] must be 0 or 1, got [1]"]),
    "unknown field": (record(text="a", label=1), [], ["line 1: unknown field label beside text"]),
    "misspelt field": (record(promt="a", response="b"), [], ['Did you mean "prompt"?']),
    "two kinds": (record(text="a", input_ids=[1]), [], ["line 1: fields of several kinds: input_ids, text"]),
    "role a list": (record(messages=[{"role": [], "content": ""}]), [], ["message 1 has the role []"]),
    "no assistant": (record(messages=[{"role": "user", "content": ""}]), [], ["conversation has no assistant turn"]),
    "Parquet empty": (put("data.parquet", ""), PARQUET, ["data.parquet is not a Parquet file"]),
    "Parquet of lines": (put("data.parquet", '{"text": "a"}' * 9), PARQUET, ["data.parquet is not a Parquet file"]),
    "Parquet of dates": (nanoseconds, PARQUET, ["data.parquet is not a Parquet file that can be read", "Nanosecond"]),
    "Parquet of bytes": (parquet(text=[b"\xff"]), PARQUET, ["data.parquet, row 1: text must be a string"]),
    "Parquet with a column twice": (column_twice, PARQUET, ["several columns are called text"]),
    "Parquet of nulls": (
        parquet(text=["a", None]),
        PARQUET,
        ["data.parquet, row 2: a record has", "no field at all"],
    ),
}
TABLE = {
    f"{of}: {name}": row
    for of, rows in {"recipe": YAML, "path": PATHS, "model": MODELS, "data": DATA}.items()
    for name, row in rows.items()
}


@pytest.mark.more
@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused(name: str, work: Path, capsys: Any, monkeypatch: Any) -> None:
    """One message, exit code 2, and nothing has changed."""
    prepare, overrides, words = TABLE[name]
    monkeypatch.chdir(work)
    monkeypatch.delenv("ENGINES_DEVICE", raising=False)
    recipe(work)
    prepare(work)
    before = snapshot(work)
    assert main(["train", "recipe.yaml", *overrides]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("Error: ")
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err
    assert not said.out, "refused before anything starts"
    after = snapshot(work)
    assert {path: after[path] for path in after if path != "out/.lock"} == {
        path: before[path] for path in before if path != "out/.lock"
    }


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_more_processes_than_visible_gpus(strategy: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted without torch, in a process of its own."""
    monkeypatch.setenv("ENGINES_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    file = recipe(work, engine={"strategy": strategy}, launch={"nproc": 4})
    before = snapshot(work)
    code, output = run(file, "engine.device=null")
    assert code == 2
    assert output.startswith("Error: 4 processes need a cuda device each, and 2 can be seen here\nLower launch.nproc")
    assert snapshot(work) == before
