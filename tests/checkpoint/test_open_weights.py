"""A model's weights come out of a checkpoint as out of a Hugging Face folder, or with a word on why not."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.checkpoint import open_weights
from engines.checkpoint.weights import CheckpointWeights
from engines.checkpoint_folder import checksum, look
from engines.errors import CheckpointError, EnginesError, ModelError
from engines.models import PackedCausalLM, build_causal_lm, export_plan, load_plan
from engines.testing.tiny import FAMILIES, tiny_folder
from engines.weights import ModelFiles, PretrainedFolder, WeightsReader
from support.checkpoints import CONFIG, cut_all, save_on_rank, save_whole, tensors

CHOSEN = ("llama_tied", "qwen3_moe", "mixtral", "gpt2", "gpt_oss")


def families() -> list[Any]:
    names = dict.fromkeys((*CHOSEN, *FAMILIES))
    return [pytest.param(name, marks=[] if name in CHOSEN else [pytest.mark.more]) for name in names]


def filled(source: WeightsReader) -> PackedCausalLM:
    model = build_causal_lm(source.path)
    model.materialize("cpu")
    plan = load_plan(model.model, source)
    with torch.no_grad():
        for name, weight in model.named_weights():
            weight.copy_(plan[name].read([0] * weight.dim(), weight.shape))
    return model


def exported(model: PackedCausalLM) -> dict[str, Tensor]:
    weights = dict(model.named_weights())
    return dict(pair for group in export_plan(model.model) for pair in group.tensors(weights))


def save_model(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    whole = {f"model.{name}": weight.detach().contiguous() for name, weight in weights.items()}
    save_whole(path, shards=cut_all(whole, 0, 1), model_files=ModelFiles.read(folder))
    return path


@pytest.mark.parametrize("family", families())
def test_names_of_the_model_and_of_its_folder_are_read_alike(family: str, tmp_path: Path) -> None:
    """The model's own hold experts fused, its folder's one by one; an export is that of the folder either way."""
    folder = tiny_folder(tmp_path, family)
    model = filled(PretrainedFolder(folder))
    own, theirs = dict(model.named_weights()), exported(model)
    if family in ("qwen3_moe", "mixtral"):
        assert "model.layers.1.mlp.experts.gate_up_proj" in own.keys() - theirs.keys()
    for name, weights in (("own", own), ("theirs", theirs)):
        source = open_weights(save_model(tmp_path / name, weights, folder))
        assert source.keys() == weights.keys()
        again = filled(source)
        for key, weight in again.named_weights():
            assert torch.equal(weight, own[key]), key
        assert exported(again).keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in exported(again).items())
        source.close()


def test_any_block_whatever_layout_wrote_it(tmp_path: Path, world: Any) -> None:
    world(3)(save_on_rank, tmp_path / "step-20", tensors())
    source = open_weights(tmp_path / "step-20")
    assert source.config == CONFIG
    assert source.keys() == {key.removeprefix("model.") for key in tensors() if key.startswith("model.")}
    draw = random.Random(0)
    for key, whole in tensors().items():
        if not key.startswith("model."):
            continue
        name = key.removeprefix("model.")
        assert (source.shape(name), source.dtype(name)) == (tuple(whole.shape), whole.dtype)
        assert torch.equal(source.read(name), whole)
        for _ in range(20):
            index = tuple(slice(*sorted((draw.randint(0, n), draw.randint(0, n)))) for n in whole.shape)
            index = index[: draw.randint(0, len(index))]
            assert torch.equal(source.read(name, index), whole[index]), (name, index)
    with pytest.raises(CheckpointError, match=r'no tensor \'model.evn\'. Did you mean "model.even"'):
        source.read("evn")


def test_what_says_that_a_checkpoint_is_none_of_huggingface(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    (folder / "manifest.json").write_text("{}")  # somebody else's file of that name
    assert isinstance(open_weights(folder), PretrainedFolder)
    save_whole(tmp_path / "step-20")
    assert isinstance(open_weights(tmp_path / "step-20"), CheckpointWeights)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip_a_bit, lambda file: os.truncate(file, file.stat().st_size - 1), Path.unlink])
def test_damage_is_named_where_it_matters(tmp_path: Path, world: Any, damage: Callable[[Path], None]) -> None:
    """Without torch too, but for bits of weights; of optimizer and rank state nothing is read."""
    world(2)(save_on_rank, tmp_path / "whole", tensors())
    for name in sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_file()):
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(tmp_path / "whole", copy)
        damage(copy / name)
        if name.startswith(("optimizer-", "rank-")):
            open_weights(copy).close()
            continue
        assert all(name in message for message in world(2)(refusal, copy))
        if damage is flip_a_bit and name.startswith("model-"):
            look(copy)
        else:
            with pytest.raises(CheckpointError, match=name):
                look(copy)


def refusal(path: Path) -> str:
    """On every rank, though they share the checking."""
    assert dist.get_world_size() == 2
    with pytest.raises(EnginesError) as caught:
        open_weights(path)
    return str(caught.value)


def refused(path: Path) -> str:
    messages = []
    for load in (open_weights, build_causal_lm):
        with pytest.raises(EnginesError) as caught:
            load(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_a_folder_of_checkpoints_and_an_output_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (5, 20, 100):
        save_whole(out / f"checkpoints/step-{step}")
        if step != 20:
            move_to_step(out / f"checkpoints/step-{step}", step)
    os.truncate(out / "checkpoints/step-100/model-00000-of-00001.safetensors", 100)
    (out / "checkpoints/step-200").mkdir()
    for path in (out / "checkpoints", out):
        message = refused(path)
        assert f"model.path: {path} holds checkpoints; name one of them" in message
        assert f"The latest complete one is {out}/checkpoints/step-20." in message
        assert "export" not in message
    (out / "export").mkdir()
    (out / "export/config.json").touch()
    assert refused(out).endswith(f" Its export is {out}/export.")
    shutil.rmtree(out / "checkpoints/step-20")
    os.truncate(out / "checkpoints/step-5/index.json", 0)
    assert f"{out}/checkpoints holds no complete checkpoint." in refused(out)


def move_to_step(path: Path, step: int) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["info"]["step"] = step
    del manifest["xxh3"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "xxh3": checksum(manifest)}))


def test_an_incomplete_checkpoint(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    shutil.copytree(tmp_path / "step-20", tmp_path / "step-30")
    (tmp_path / "step-30/manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "step-30")
    assert str(caught.value) == (
        f"model.path: {tmp_path}/step-30 is not a complete checkpoint: it has no manifest.json\n"
        f"The latest complete one is {tmp_path}/step-20."
    )


def test_a_checkpoint_from_before_they_held_a_config(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20", model_files=ModelFiles(tmp_path, {}))
    message = refused(tmp_path / "step-20")
    assert "is a checkpoint without config.json, as engines-core wrote them once" in message
    assert "name the run's export" in message


def test_weights_that_were_not_saved(tmp_path: Path) -> None:
    optimizer = {key: tensor for key, tensor in tensors().items() if key.startswith("optimizer.")}
    save_whole(tmp_path / "step-20", shards=cut_all(optimizer, 0, 1))
    with pytest.raises(CheckpointError, match="holds optimizer, state, but not model"):
        open_weights(tmp_path / "step-20")


def test_files_of_a_model_with_names_that_need_care(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates/inner").mkdir(parents=True)
    kept = ["config.json", "tokenizer (1).json", "additional_chat_templates/inner/\u00e4.jinja", "spiece.model"]
    left = [".tokenizer.json", "additional_chat_templates/.DS_Store", "state.json", "index.json", "README.md"]
    for name in kept + left:
        (folder / name).write_text(name)
    (folder / "config.json").write_text("{}")
    files = ModelFiles.read(folder)
    assert sorted(files.contents) == sorted(kept)
    save_whole(tmp_path / "step-20", model_files=files)
    look(tmp_path / "step-20")
    assert ModelFiles.read(tmp_path / "step-20").contents == files.contents
    assert ModelFiles.read(tmp_path / "absent").contents == {}
    with pytest.raises(ModelError, match="there is no folder"):
        ModelFiles.read(tmp_path / "absent").config()
