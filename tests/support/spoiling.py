"""Changes to a job's folder that make its input bad: the recipe's, the model's, the data's, checkpoints'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.commands import write_jsonl

Prepare = Callable[[Path], object]
"""Given the folder that the command runs in."""


def edit(name: str, **changes: Any) -> Prepare:
    def prepare(work: Path) -> None:
        file = work / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return prepare


def put(name: str, content: str | bytes) -> Prepare:
    def prepare(work: Path) -> None:
        clear(work / name)
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def clear(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def lose(*names: str) -> Prepare:
    return lambda work: [(work / name).unlink() for name in names]


def cut_weights(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def shards_missing(work: Path) -> None:
    (work / "model" / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (work / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled_weights(work: Path) -> None:
    (work / "model" / "model.safetensors").rename(work / "model" / "pytorch_model.bin")


def data(*records: dict[str, Any]) -> Prepare:
    return lambda work: write_jsonl(work / "data.jsonl", list(records))


def earlier_run(work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / "metrics.jsonl").write_text('{"step": 1}\n')


def later_checkpoints(work: Path) -> None:
    from support.checkpoints import save_whole

    for step in (2, 4):
        save_whole(work / "out" / "checkpoints" / f"step-{step}", step=step)


def finished_run_without_checkpoints(work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / "run.json").write_text('{"steps": 3, "finished": true}')


def earlier_checkpoints(work: Path) -> None:
    """`earlier`: the output folder of a run with two checkpoints, step-20 and a copy that isn't complete."""
    from engines.weights import ModelFiles
    from support.checkpoints import save_whole

    checkpoints = work / "earlier" / "checkpoints"
    save_whole(checkpoints / "step-20", model_files=ModelFiles.read(work / "model"))
    shutil.copytree(checkpoints / "step-20", checkpoints / "step-30")
    (checkpoints / "step-30" / "manifest.json").unlink()


def earlier(change: Callable[[Path], object]) -> Prepare:
    """`earlier_checkpoints`, and then a change to step-20."""

    def prepare(work: Path) -> None:
        earlier_checkpoints(work)
        change(work / "earlier" / "checkpoints" / "step-20")

    return prepare


def without_config(work: Path) -> None:
    from engines.weights import ModelFiles
    from support.checkpoints import save_whole

    save_whole(work / "earlier" / "checkpoints" / "step-20", model_files=ModelFiles(work, {}))


def weights_alone(work: Path) -> None:
    from support.checkpoints import cut_all, info, save_whole, tensors

    model = {key: tensor for key, tensor in tensors().items() if key.startswith("model.")}
    changes = {"shards": cut_all(model, 0, 1), "info": info(optimizer=None), "state": None, "rank_state": None}
    save_whole(work / "earlier" / "checkpoints" / "step-20", **changes)


def value_checkpoint(work: Path) -> None:
    from engines.weights import ModelFiles
    from support.checkpoints import info, save_whole

    files = ModelFiles.read(work / "model")
    save_whole(work / "earlier" / "checkpoints" / "step-20", info=info(model_type="value_model"), model_files=files)


def export_a_checkpoint(work: Path) -> None:
    earlier_checkpoints(work)
    shutil.copytree(work / "earlier" / "checkpoints" / "step-20", work / "out" / "export")


def export_the_model(work: Path) -> None:
    shutil.copytree(work / "model", work / "out" / "export")
