"""What a user mistypes or lacks: exit code 2, the words that matter, no traceback, nothing changed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.cli.main import main
from support.commands import read_jsonl, recipe, run, snapshot, write_jsonl
from support.spoiling import (
    Prepare,
    cut_weights,
    data,
    earlier,
    earlier_checkpoints,
    earlier_run,
    edit,
    export_a_checkpoint,
    export_the_model,
    finished_run_without_checkpoints,
    later_checkpoints,
    lose,
    pickled_weights,
    put,
    shards_missing,
    value_checkpoint,
    weights_alone,
    without_config,
)

SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "misspelt section": (["trainr.steps=3"], ['trainr: unknown key. Did you mean "trainer"?']),
    "misspelt key": (["trainer.stepz=3"], ['trainer.stepz: unknown key. Did you mean "steps"?']),
    "misspelt engine key": (
        ["engine.micro_batch_sise=3"],
        ['engine.micro_batch_sise: unknown key. Did you mean "micro_batch_size"?'],
    ),
    "two faults at once": (["trainer.stepz=3", "engine.foo=1"], ["trainer.stepz", "engine.foo"]),
    "unknown recipe": (["recipe=sftt"], ["recipe:", "sftt", 'Did you mean "sft"?']),
    "unknown strategy": (["engine.strategy=fdsp2"], ["fdsp2", 'Did you mean "fsdp2"?']),
    "unknown device": (["engine.device=cpuu"], ["cpuu", 'Did you mean "cpu"?']),
    "absent device": (["engine.device=npu"], ["npu", "no such device here"]),
    "strategy not a word": (["engine.strategy=[1]"], ["engine.strategy: must be a string"]),
    "engine not a section": (["engine=fsdp2"], ["engine: must hold keys of its own, got 'fsdp2'"]),
    "wrong type": (["trainer.steps=many"], ["trainer.steps", "valid integer", "'many'"]),
    "half a step": (["trainer.steps=2.5"], ["trainer.steps", "2.5"]),
    "no steps": (["trainer.steps=0"], ["trainer.steps", "greater than or equal to 1"]),
    "negative batch": (["trainer.mini_batch_size=-3"], ["trainer.mini_batch_size", "-3"]),
    "a word of YAML 1.1": (["engine.strategy=on"], ['No installed engine has the backend "on"']),
    "minutes": (["trainer.steps=1:30"], ["trainer.steps: input should be a valid integer", "'1:30'"]),
    "a leading zero": (
        ["trainer.steps=010"],
        ["trainer.steps=010: 010 begins with a zero, and is 8 in YAML 1.1, 10 in YAML 1.2", "Write 10, or"],
    ),
    "a number for a name": (["trainer.output_dir=7"], ["trainer.output_dir: ", "got 7. Put it in quotes"]),
    "steps and epochs": (["trainer.epochs=2"], ["steps and epochs both say how long to train"]),
    "neither": (["trainer.steps=null"], ["steps or epochs must say how long to train"]),
    "lr NaN": (["optimizer.lr=nan"], ["optimizer.lr", "nan"]),
    "lr negative": (["optimizer.lr=-1"], ["optimizer.lr", "greater than 0"]),
    "lr infinite": (["optimizer.lr=inf"], ["optimizer.lr", "finite"]),
    "clip 0": (["optimizer.clip_grad=0"], ["optimizer.clip_grad", "greater than 0"]),
    "clip NaN": (["optimizer.clip_grad=nan"], ["optimizer.clip_grad", "nan"]),
    "clip negative": (["optimizer.clip_grad=-1"], ["optimizer.clip_grad"]),
    "decay NaN": (["optimizer.weight_decay=nan"], ["optimizer.weight_decay"]),
    "beta 1": (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas.1", "less than 1"]),
    "eps 0": (["optimizer.eps=0"], ["optimizer.eps"]),
    "unknown schedule": (["optimizer.schedule=cosin"], ['Did you mean "cosine"?']),
    "warm-up negative": (["optimizer.warmup_steps=-1"], ["optimizer.warmup_steps"]),
    "both budgets": (
        ["engine.micro_batch_size=1", "engine.max_tokens_per_micro_batch=64"],
        ["micro_batch_size and max_tokens_per_micro_batch", "set one of them"],
    ),
    "unknown dtype": (["model.dtype=bf16"], ["model.dtype", "bfloat16"]),
    "not declared": (
        ["engine.tensor_parallel_size=2", "launch.nproc=2"],
        ["engine.tensor_parallel_size: 2 needs the capability tensor_parallel, which fsdp2 lacks", "Use 1."],
    ),
    "lora": (["engine.lora_rank=8"], ["engine.lora_rank", "lora"]),
    "replicas don't divide": (
        ["engine.data_parallel_replicate_size=2", "launch.nproc=3"],
        ["data_parallel_replicate_size: 2 replicas don't divide 3 processes", "one of 1, 3"],
    ),
    "no process": (["launch.nproc=0"], ["launch.nproc"]),
    "no time": (["launch.timeout_s=nan"], ["launch.timeout_s"]),
    "truncate to nothing": (["data.overlong=truncate"], ["data: overlong=truncate needs max_length"]),
    "evaluate on nothing": (["trainer.eval_every=2"], ["Error: trainer.eval_every needs data.eval, the file"]),
    "unknown logger": (["trainer.loggers=[mlflow]"], ["trainer.loggers.0", "mlflow"]),
    "logger not installed": (["trainer.loggers=[wandb]"], ["wandb is not installed", "pip install wandb"]),
    "seed negative": (["trainer.seed=-1"], ["trainer.seed"]),
    "model a URL": (["model.path=s3://bucket/model"], ["model.path: must not be a URL", "mount it, or copy it"]),
    "output a URL": (["trainer.output_dir=memory://out"], ["trainer.output_dir: must not be a URL", "mount it"]),
    "data a URL": (
        ["data.train=https://host/a.jsonl", "data.eval=s3://b/c.jsonl"],
        ["data.train: must not be a URL", "data.eval: must not be a URL"],
    ),
    "resume a URL": (["trainer.resume=gs://b/step-2"], ["trainer.resume: must not be a URL", "'gs://b/step-2'"]),
    "contents unknown": (
        ["trainer.checkpoint_contents=[model,optimiser]"],
        ["trainer.checkpoint_contents.1", 'Did you mean "optimizer"?'],
    ),
    "contents of no use": (
        ["trainer.checkpoint_contents=[state,optimizer]"],
        ["trainer.checkpoint_contents: model or huggingface must be among them"],
    ),
    "resume nowhere": (["trainer.resume=nevr"], ["there is no checkpoint nevr", 'Did you mean "never"?']),
    "interpolation": (["trainer.output_dir=${nowhere}"], ["nowhere", "not found"]),
    "override without value": (
        ["trainer.steps"],
        ["trainer.steps is neither a recipe file nor KEY=VALUE", "without spaces: trainer.steps=VALUE."],
    ),
    "part of a list": (["trainer.loggers[0]=wandb"], ["sets a list as a whole", "Write trainer.loggers=[...]"]),
    "no suffix": (["recip"], ['recip is neither a recipe file nor KEY=VALUE. Did you mean "recipe.yaml"?']),
    "override not YAML": (["trainer.loggers=[a"], ["trainer.loggers=[a", "spelt KEY=VALUE"]),
    "no such recipe": (["more.yaml"], ["there is no recipe file more.yaml"]),
    "sample over max_length": (["data.max_length=3"], ["data.jsonl, line 1:", "data.max_length: 3"]),
    "sample over the budget": (
        ["engine.max_tokens_per_micro_batch=3"],
        ["data.jsonl, line 1:", "engine.max_tokens_per_micro_batch: 3"],
    ),
}


STEP_20 = "model.path=earlier/checkpoints/step-20"
LATEST_20 = "The latest complete one is earlier/checkpoints/step-20."
WEIGHTS = "model-00000-of-00001.safetensors"

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

FILES: dict[str, tuple[Prepare, list[str], list[str]]] = {
    "recipe not YAML": (put("recipe.yaml", "a: [1"), [], ["recipe.yaml is not YAML", "line"]),
    "recipe a list": (put("recipe.yaml", "- 1"), [], ["recipe.yaml holds a list"]),
    "recipe empty": (put("recipe.yaml", ""), [], ["recipe: is required, and missing"]),
    "no model folder": (lambda work: None, ["model.path=nowhere"], ["there is no folder nowhere"]),
    "no config.json": (lose("model/config.json"), [], ["holds no config.json"]),
    "config not JSON": (put("model/config.json", "{"), [], ["config.json is not JSON"]),
    "config without type": (edit("model/config.json", model_type=None), [], ["names no model_type"]),
    "vocabulary a word": (edit("model/config.json", vocab_size="big"), [], ["vocab_size", "'big'"]),
    "no weights": (lose("model/model.safetensors"), [], ["holds no weights"]),
    "weights pickled": (pickled_weights, [], ["holds no weights", "pytorch_model.bin", "save_pretrained"]),
    "weights truncated": (cut_weights, [], ["model.safetensors is truncated"]),
    "shard missing": (shards_missing, [], ["model-00001-of-00002.safetensors is missing"]),
    "folder of checkpoints": (
        earlier_checkpoints,
        ["model.path=earlier/checkpoints"],
        ["model.path: earlier/checkpoints holds checkpoints; name one of them", LATEST_20],
    ),
    "output folder": (earlier_checkpoints, ["model.path=earlier"], ["earlier holds checkpoints", LATEST_20]),
    "checkpoint incomplete": (
        earlier_checkpoints,
        ["model.path=earlier/checkpoints/step-30"],
        ["step-30 is not a complete checkpoint: it has no manifest.json", LATEST_20],
    ),
    "checkpoint absent": (
        earlier_checkpoints,
        ["model.path=earlier/checkpoints/step-9"],
        ["there is no folder earlier/checkpoints/step-9", "earlier/checkpoints holds step-20, step-30"],
    ),
    "checkpoint truncated": (
        earlier(lambda step: os.truncate(step / WEIGHTS, 100)),
        [STEP_20],
        [f"model.path: earlier/checkpoints/step-20/{WEIGHTS} has 100 bytes", "holds no complete checkpoint"],
    ),
    "config of a checkpoint changed": (
        earlier(lambda step: (step / "config.json").write_text((step / "config.json").read_text() + " ")),
        [STEP_20],
        ["model.path: earlier/checkpoints/step-20/config.json has"],
    ),
    "config of a checkpoint lost": (
        earlier(lambda step: (step / "config.json").unlink()),
        [STEP_20],
        ["earlier/checkpoints/step-20/config.json is missing"],
    ),
    "manifest of something else": (
        earlier(lambda step: (step / "manifest.json").write_text("{}")),
        [STEP_20],
        ["model.path: earlier/checkpoints/step-20/manifest.json is damaged"],
    ),
    "checkpoint of before": (
        without_config,
        [STEP_20],
        ["earlier/checkpoints/step-20 is a checkpoint without config.json", "name the run's export"],
    ),
    "export a checkpoint": (
        export_a_checkpoint,
        [],
        ["out/export is a checkpoint, which an export would replace"],
    ),
    "no data": (lose("data.jsonl"), [], ["data.train: there is no data file"]),
    "data empty": (put("data.jsonl", ""), [], ["data.jsonl holds no records"]),
    "data broken": (put("data.jsonl", '{"input_ids": [1]}\n{'), [], ["data.jsonl, line 2: broken JSON"]),
    "a key twice": (
        put("data.jsonl", '{"text": "a"}\n{"messages": [{"role": "user", "content": "a", "content": "b"}]}'),
        [],
        ["data.jsonl, line 2: content stands twice in an object"],
    ),
    "half a character": (
        put("data.jsonl", '{"text": "\\ud800 x"}'),
        [],
        ["data.jsonl, line 1: text holds '\\ud800'"],
    ),
    "half a character said": (
        data({"messages": [CHAT["messages"][0], {"role": "assistant", "content": "\udfff"}]}),
        [],
        ["data.jsonl, line 1: message 2: content holds"],
    ),
    "export with a run in it": (
        lambda work: (put("out/export/config.json", "{}")(work), put("out/export/run.json", "{}")(work)),
        [],
        ["out/export holds run.json beside a model, which an export would delete"],
    ),
    "export of the model": (
        export_the_model,
        ["model.path=out/export"],
        ["the export would take the place of model.path, out/export", "or set trainer.export=false, and have"],
    ),
    "output in a model": (
        lambda work: None,
        ["trainer.output_dir=model"],
        ["trainer.output_dir: model is a model's folder: it holds model.safetensors"],
    ),
    "output in a model without weights": (
        put("out/config.json", "{}"),
        [],
        ["out is a model's folder: it holds config.json"],
    ),
    "output over the recipe": (
        lambda work: None,
        ["trainer.output_dir=."],
        ["recipe.yaml was not written by a run", "Choose another trainer.output_dir, or give the file another name."],
    ),
    "export taken": (put("out/export", ""), [], ["out/export is a file", "trainer.export=false"]),
    "id outside": (data({"input_ids": [1, 999]}), [], ["line 1: input_ids[1] is 999", "256"]),
    "text without tokenizer": (data({"text": "a"}), [], ["data.jsonl holds text", "has no tokenizer"]),
    "evaluation missing": (
        lambda work: None,
        ["data.eval=nowhere.jsonl"],
        ["data.eval: there is no data file nowhere.jsonl"],
    ),
    "output a file": (put("out", ""), [], ["out is a file, not a folder"]),
    "nothing to learn from": (
        data({"input_ids": [1], "loss_mask": [1]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}),
        [],
        ["data.jsonl has nothing to learn from: no token of its 2 samples is a target"],
    ),
    "checkpoints not mounted": (
        lambda work: ((work / "out").mkdir(), (work / "out" / "checkpoints").symlink_to(work / "gone")),
        [],
        ["out/checkpoints is a link that leads nowhere"],
    ),
    "never, but a run": (earlier_run, ["trainer.resume=never"], ["trainer.resume is never, but"]),
    "no checkpoint there": (earlier_run, ["trainer.resume=out"], ["out is not a complete checkpoint"]),
    "later checkpoints": (
        later_checkpoints,
        ["trainer.resume=out/checkpoints/step-2"],
        ["step-2, but", "already holds step-4"],
    ),
    "checkpoint of another run": (
        earlier_checkpoints,
        ["trainer.resume=earlier/checkpoints/step-20", "trainer.steps=30"],
        [
            "earlier/checkpoints/step-20 belongs to another run:\n",
            "\n  model.hidden_size: nothing in the checkpoint, ",
            "\n  vocabulary (tokenizer.json): 00ff in the checkpoint, nothing in this run",
            "\n  optimizer.weight_decay: nothing in the checkpoint, 0.0 in this run",
        ],
    ),
    "checkpoint without optimizer": (
        weights_alone,
        ["trainer.resume=earlier/checkpoints/step-20", "trainer.steps=30"],
        ["step-20 holds model, but not optimizer and state: no run can go on from it", "name it as model.path"],
    ),
    "a value model": (
        edit("model/config.json", architectures=["LlamaForSequenceClassification"]),
        [],
        ["model.path: ", "model holds a LlamaForSequenceClassification, which has no head for the next token"],
    ),
    "checkpoint of a value model": (value_checkpoint, [STEP_20], ["earlier/checkpoints/step-20 holds a value model"]),
    "checkpoints gone": (finished_run_without_checkpoints, [], ["finished run of 3 steps, but none of its"]),
    "beyond the end": (later_checkpoints, ["trainer.steps=3"], ["step-4 is 4 steps old", "shall have 3"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    overrides, words = SETTINGS[name]
    check(work, overrides, words, capsys, monkeypatch)


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    prepare, overrides, words = FILES[name]
    recipe(work)
    prepare(work)
    check(work, overrides, words, capsys, monkeypatch)


def test_messages_without_a_chat_template(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from support.tokenizer import tiny_tokenizer

    tiny_tokenizer(work / "model", template=None)
    write_jsonl(work / "data.jsonl", [CHAT])
    check(work, [], ["data.jsonl holds messages", "has no chat template"], capsys, monkeypatch)


def test_a_folder_that_cannot_be_written(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """For root as well, who may write everywhere but here."""
    check(work, ["trainer.output_dir=/proc/out"], ["/proc/out", "can't be written"], capsys, monkeypatch)


def test_a_folder_in_use(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from engines.recipes.output.folder import OutputFolder

    with OutputFolder(work / "out").locked():
        check(work, [], ["out is in use by another run"], capsys, monkeypatch)


def test_a_device_whose_module_is_missing(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from engines.devices import DeviceSpec
    from support.bigram import registered

    abacus = DeviceSpec("abacus", 1, ("/dev/null",), "torch_abacus", "gloo", None, "cpu")
    overrides = ["engine.strategy=bigram", "engine.device=abacus"]
    with registered(device="abacus", devices=[abacus]):
        check(work, overrides, ["needs torch_abacus, not installed"], capsys, monkeypatch)


def check(
    work: Path, overrides: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The command in this process; whatever it says is on standard error, and no file changes."""
    monkeypatch.chdir(work)
    monkeypatch.delenv("ENGINES_DEVICE", raising=False)
    if not (work / "recipe.yaml").exists():
        recipe(work)
    before = snapshot(work)
    assert main(["train", "recipe.yaml", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert "Traceback" not in error
    for word in words:
        assert word in error
    assert snapshot(work) == before


def test_a_mistyped_key_is_answered_fast_and_without_torch(work: Path) -> None:
    """Within a second on an idle machine; counted is the time on the processor, since this one may be busy."""
    script = (
        "import sys; from engines.cli.main import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "train", recipe(work), "trainer.stepz=3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_faults_that_only_ranks_can_find(work: Path) -> None:
    """Said once, with exit code 2, and the output folder left as it was found."""
    from support.tokenizer import tiny_tokenizer

    tiny_tokenizer(work / "model")
    write_jsonl(work / "data.jsonl", [{"text": "short"}, {"text": "much longer than the others"}])
    before = snapshot(work)
    file = recipe(work, data={"max_length": 10}, launch={"nproc": 2})
    code, output = run(file)
    assert code == 2, output
    assert output.count("line 2: the sample has 28 tokens, more than data.max_length: 10") == 1
    assert "Traceback" not in output
    file.unlink()
    assert snapshot(work) == before


@pytest.mark.more
def test_a_run_resumed_with_other_data_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(work, trainer={"steps": 1, "export": False})
    code, output = run(file)
    assert code == 0, output
    before = snapshot(work / "out")
    write_jsonl(work / "data.jsonl", read_jsonl(work / "data.jsonl")[:-1])
    code, output = run(file, "trainer.steps=2")
    assert code == 2, output
    assert "samples would not go on where it stopped" in output
    assert "number of samples in data.train: 13 in the checkpoint, 12 in this run" in output
    assert snapshot(work / "out") == before

    assert main(["train", str(file), "trainer.steps=2", "optimizer.lr=0.5", "trainer.seed=5"]) == 2
    said = capsys.readouterr()
    assert "step-1 belongs to another run:" in said.err
    assert "optimizer.lr: " in said.err
    assert "0.5 in this run" in said.err
    assert "trainer.seed: 0 in the checkpoint, 5 in this run" in said.err
    assert not said.out, "refused before anything starts"
    assert snapshot(work / "out") == before

    checkpoint = work / "out" / "checkpoints" / "step-1"
    with (checkpoint / "index.json").open("a") as index:
        index.write(" ")
    before = snapshot(work / "out")
    code, output = run(file, "trainer.steps=2")
    assert code == 2, output
    assert f"{checkpoint / 'index.json'} has" in output
    assert "Restore step-1 from a copy, or move it away: the same command then starts afresh." in output
    assert snapshot(work / "out") == before
