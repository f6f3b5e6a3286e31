"""Model folders as transformers writes them, read by slices; and what is said of those that can't be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engines.errors import ModelError
from engines.testing.tiny import tiny_folder, tiny_model
from engines.weights import PretrainedFolder

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in one file, and in several."""
    return {
        "single": tiny_folder(tmp_path_factory.mktemp("single"), "llama"),
        "sharded": tiny_folder(tmp_path_factory.mktemp("sharded"), "llama", shard_size="100KB"),
    }


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_what_transformers_wrote(folders: dict[str, Path], kind: str) -> None:
    weights = PretrainedFolder(folders[kind])
    expected = tiny_model("llama").state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights.shape(name), weights.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(weights.read(name), tensor)
    rows = (slice(3, 9), slice(0, 64, None))
    assert torch.equal(weights.read(EMBEDDING, rows), expected[EMBEDDING][3:9])
    assert weights.config["model_type"] == "llama"
    weights.close()


def test_the_fixture_is_sharded(folders: dict[str, Path]) -> None:
    assert len(list(folders["sharded"].glob("*.safetensors"))) > 2
    assert len(list(folders["single"].glob("*.safetensors"))) == 1


def test_dtypes_and_tensors_without_dimension(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    held = {"a": torch.tensor(2.5, dtype=torch.bfloat16), "b": torch.zeros(0, 3), "c": torch.tensor([1, 2])}
    save_file(held, tmp_path / "model.safetensors")
    weights = PretrainedFolder(tmp_path)
    for name, tensor in held.items():
        assert weights.dtype(name) == tensor.dtype
        assert torch.equal(weights.read(name), tensor)
    assert weights.read("c", (slice(1, 2),)).tolist() == [2]


def test_an_unknown_weight_is_answered_with_the_closest(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r'no weight \'model.embed_token.weight\'. Did you mean "model.embed_tokens'):
        PretrainedFolder(folders["single"]).shape("model.embed_token.weight")


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def rename_to_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def plant_pickle(folder: Path) -> None:
    torch.save({}, folder / "model.safetensors")


def swap_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    shutil.copy(first, second)


def index_elsewhere(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][EMBEDDING] = "../single.safetensors"
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("single", shutil.rmtree, "model.path: there is no folder"),
        ("single", lambda f: (f / "config.json").unlink(), "holds no config.json"),
        ("single", lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        ("single", lambda f: (f / "config.json").write_text("[]"), "config.json holds list, not an object"),
        ("single", lambda f: (f / "model.safetensors").unlink(), "download the model's weights"),
        ("single", rename_to_bin, "convert pytorch_model.bin"),
        ("single", lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors is truncated"),
        ("single", lambda f: os.truncate(f / "model.safetensors", 0), "model.safetensors is truncated"),
        ("single", plant_pickle, "model.safetensors is truncated, or not a safetensors file"),
        ("sharded", lambda f: second_shard(f).unlink(), "model-00002-of-.* is missing; model.safetensors.index.json"),
        ("sharded", lambda f: os.truncate(second_shard(f), 300), "model-00002-of-.* is truncated"),
        ("sharded", swap_shards, "model-00002-of-.* lacks .*, which model.safetensors.index.json says it holds"),
        ("sharded", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        ("sharded", index_elsewhere, r"\.\./single.safetensors is missing"),
    ],
)
def test_folders_that_cannot_be_loaded(
    folders: dict[str, Path], tmp_path: Path, kind: str, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders[kind], folder)
    damage(folder)
    with pytest.raises(ModelError, match=words):
        PretrainedFolder(folder)
