"""A damaged checkpoint is named as such, file by file, and nothing in it is ever run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines import checkpoint
from engines.checkpoint.reading import Checkpoint, PartReader
from engines.checkpoint_folder.manifest import TensorRecord
from engines.errors import CheckpointError, ModelError
from support.checkpoints import save_on_rank, save_whole, tensors

MODEL_FILES = ("additional_chat_templates/a b.jinja", "config.json")
FILES = (
    *MODEL_FILES,
    "index.json",
    "manifest.json",
    "model-00000-of-00001.safetensors",
    "optimizer-00000-of-00001.safetensors",
    "rank-00000-of-00001.safetensors",
    "state.json",
)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save_whole(tmp_path / "step-20")
    damage(tmp_path / "step-20" / name)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.open(tmp_path / "step-20")


def test_there_are_no_other_files(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    folder = tmp_path / "step-20"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == list(FILES)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", FILES)
def test_a_planted_pickle_is_reported_and_not_run(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "executed"
    save_whole(tmp_path / "step-20")
    file = tmp_path / "step-20" / name
    torch.save(Payload(mark), file) if name.endswith("safetensors") else file.write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(CheckpointError, match=name):
        checkpoint.open(tmp_path / "step-20")
    if name not in MODEL_FILES:
        with pytest.raises(CheckpointError, match=name):  # even where nobody looked at the checksums
            read_everything(tmp_path / "step-20")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload of this test is harmless"


def read_everything(path: Path) -> None:
    opened = Checkpoint(path)
    reader = opened.reader(["model", "optimizer"])
    for key in sorted(reader.keys()):
        reader.read(key, [0] * len(reader.shape(key)), reader.shape(key))
    opened.rank_state(0)
    assert opened.state


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    for name in FILES[4:6]:
        flip_a_bit(tmp_path / "step-20" / name)
    faults = Checkpoint(tmp_path / "step-20").faults()
    assert len(faults) == 2 and all(name in fault for name, fault in zip(FILES[4:6], faults, strict=True))
    assert Checkpoint(tmp_path / "step-20").faults(checksums=False) == []


def test_ranks_share_the_check_and_all_learn_of_damage(tmp_path: Path, world) -> None:
    world(2)(save_on_rank, tmp_path / "a", tensors())
    flip_a_bit(tmp_path / "a" / "model-00001-of-00002.safetensors")
    for message in world(2)(open_and_fail, tmp_path / "a"):
        assert "rank " in message and "model-00001-of-00002.safetensors has changed" in message


def open_and_fail(path: Path) -> str:
    assert dist.get_world_size() == 2
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(path)
    return str(caught.value)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it has no manifest\.json"):
        checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is a URL"):
        checkpoint.open("s3://bucket/step-20")
    with pytest.raises(ModelError, match="is a URL"):
        checkpoint.open_weights("memory://model")
    with pytest.raises(CheckpointError, match="is a URL"):
        save_whole("memory://step-20")  # type: ignore[arg-type]


def test_a_format_of_the_future_says_so(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    file = tmp_path / "step-20" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version of engines-core reads format 1"):
        checkpoint.open(tmp_path / "step-20")


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    from engines.checkpoint_folder import checksum

    save_whole(tmp_path / "step-20")
    file = tmp_path / "step-20" / "manifest.json"
    data = json.loads(file.read_text())
    data["files"]["../secret.json"] = data["files"]["state.json"]
    del data["xxh3"]
    file.write_text(json.dumps({**data, "xxh3": checksum(data)}))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: files.\.\./secret.json"):
        checkpoint.open(tmp_path / "step-20")


def test_a_region_that_no_piece_covers(tmp_path: Path) -> None:
    save_whole(tmp_path / "a")
    record = Checkpoint(tmp_path / "a").index.tensors["model.even"]
    grown = TensorRecord(shape=(13, 5), dtype=record.dtype, pieces=record.pieces)
    reader = PartReader(tmp_path / "a", {"model.even": grown})
    with pytest.raises(CheckpointError, match=r"only 5 of 10 elements of model\.even"):
        reader.read("model.even", (11, 0), (2, 5))


def test_an_index_that_contradicts_a_file(tmp_path: Path) -> None:
    save_whole(tmp_path / "a")
    record = Checkpoint(tmp_path / "a").index.tensors["model.even"]
    other = TensorRecord(shape=record.shape, dtype="BF16", pieces=record.pieces)
    with pytest.raises(CheckpointError, match=r"model-00000-of-00001.safetensors: model.even is torch.float32"):
        PartReader(tmp_path / "a", {"model.even": other}).read("model.even", (0, 0), (12, 5))
