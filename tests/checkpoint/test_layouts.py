"""What one layout wrote, another reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from engines import checkpoint
from engines.checkpoint import CheckpointStore
from engines.contract import Shard
from engines.errors import CheckpointError
from support.checkpoints import block, cut, cut_all, info, save_on_rank, save_whole, tensors


def test_one_process_reads_back_what_it_wrote(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    saved = checkpoint.open(tmp_path / "step-20")
    reader = saved.reader(["model", "optimizer"])
    assert reader.keys() == tensors().keys()
    for key, expected in tensors().items():
        assert reader.shape(key) == tuple(expected.shape)
        assert_same(reader.read(key, [0] * expected.dim(), expected.shape), expected)
    assert saved.state == {"position": 20, "schedule": {"last": 0.25}}
    assert saved.info == info()
    state = saved.rank_state(0)
    assert state is not None and torch.equal(state["generator"], torch.arange(4))
    assert saved.rank_state(1) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-20"]


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20")
    held = load_file(tmp_path / "step-20" / "model-00000-of-00001.safetensors")
    assert held.keys() == {key for key in tensors() if key.startswith("model.")} - {"model.nothing"}
    for key, tensor in held.items():
        assert_same(tensor, tensors()[key])
    manifest = json.loads((tmp_path / "step-20" / "manifest.json").read_text())
    folder = tmp_path / "step-20"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert manifest["contents"] == ["model", "optimizer"]


def test_every_dtype_and_a_transposed_tensor(tmp_path: Path) -> None:
    from engines.weights.safetensors_file import DTYPES

    whole = {f"model.{name}": torch.arange(6).reshape(2, 3).to(dtype).T for name, dtype in DTYPES.items()}
    save_whole(tmp_path / "a", shards=cut_all(whole, 0, 1))
    reader = checkpoint.open(tmp_path / "a").reader({"model"})
    for key, expected in whole.items():
        assert_same(reader.read(key, (1, 0), (2, 2)), expected[1:])
        for target in (torch.zeros(2, 2, dtype=expected.dtype), torch.zeros(2, 2, dtype=expected.dtype).T):
            reader.read_into(key, (1, 0), target)
            assert_same(target, expected[1:])
        wide = torch.zeros(3, 2, dtype=torch.float64)
        reader.read_into(key, (0, 0), wide)
        assert_same(wide, expected.to(torch.float64))


def test_rows_columns_and_a_middle_are_read_into_place(tmp_path: Path, world) -> None:
    """Of a tensor that a second thread helps to read, from two files that each hold half of its rows."""
    whole = torch.arange(3 * 2**21, dtype=torch.float32).reshape(3 * 2**10, 2**11)
    world(2)(save_on_rank, tmp_path / "a", {"model.w": whole})
    reader = checkpoint.Checkpoint(tmp_path / "a").reader(["model"])
    for rows, columns in [
        ((0, 3072), (0, 2048)),
        ((1000, 3071), (0, 2048)),
        ((1535, 1537), (7, 9)),
        ((5, 5), (0, 1)),
    ]:
        part = slice(*rows), slice(*columns)
        around = torch.full((3074, 2050), -1.0)
        target = around[part[0], part[1]]
        reader.read_into("model.w", (rows[0], columns[0]), target)
        assert target.equal(whole[part])
        assert (around == -1).sum() == around.numel() - target.numel()
    target = torch.empty(3072, 2048)
    reader.read_into("model.w", (0, 0), target)
    assert target.equal(whole)
    with pytest.raises(CheckpointError, match=r"reaches out of it"):
        reader.read_into("model.w", (1, 0), target)
    os.truncate(tmp_path / "a" / "model-00001-of-00002.safetensors", 2**22)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors is truncated"):
        reader.read_into("model.w", (0, 0), target)


def test_four_ranks_to_two_to_one_to_three(tmp_path: Path, world) -> None:
    whole = tensors()
    layouts = [4, 2, 1, 3]
    world(4)(save_on_rank, tmp_path / "0", whole)
    for hop, size in enumerate(layouts[1:], start=1):
        world(size)(load_and_save, tmp_path / str(hop - 1), tmp_path / str(hop))
    reader = checkpoint.open(tmp_path / "3").reader(["model", "optimizer"])
    for key, expected in whole.items():
        assert_same(reader.read(key, [0] * expected.dim(), expected.shape), expected)
    files = {path.name for path in (tmp_path / "0").iterdir()}
    assert {f"model-{rank:05d}-of-00004.safetensors" for rank in range(4)} <= files
    assert checkpoint.open(tmp_path / "0").rank_state(3) == {"rank": 3, "generator": torch.tensor([3])}


def load_and_save(source: Path, target: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reader = checkpoint.open(source).reader(["model", "optimizer"])
    loaded = []
    for key in sorted(reader.keys()):
        shape = reader.shape(key)
        offset, extent = block(key, shape, rank, size)
        piece = reader.read(key, offset, extent)
        loaded.append(Shard(key, shape, offset, piece, replica=rank if not shape else 0))
    save_on_rank(target, {}, shards=loaded)


def test_copies_are_written_once(tmp_path: Path, world) -> None:
    whole = {"model.w": torch.arange(12.0).reshape(4, 3)}
    world(4)(save_replicated, tmp_path / "a", whole)
    written = {path.name: list(load_file(path)) for path in (tmp_path / "a").glob("model-*")}
    assert written == {f"model-0000{rank}-of-00004.safetensors": ["model.w"] for rank in (0, 2)}
    assert_same(checkpoint.open(tmp_path / "a").reader(["model"]).read("model.w", (0, 0), (4, 3)), whole["model.w"])


def save_replicated(path: Path, whole: dict[str, Tensor]) -> None:
    """Two ranks hold each half, as in HSDP."""
    rank = dist.get_rank()
    half = cut("model.w", whole["model.w"], rank // 2, 2)
    save_on_rank(path, {}, shards=[Shard(half.key, half.global_shape, half.offset, half.tensor, replica=rank % 2)])


def test_several_pieces_of_one_tensor_on_one_rank(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    pieces = [Shard("model.w", (4, 3), (row, 0), whole[row : row + 1]) for row in (3, 0, 2, 1)]
    save_whole(tmp_path / "a", shards=pieces)
    assert_same(checkpoint.open(tmp_path / "a").reader(["model"]).read("model.w", (1, 1), (3, 2)), whole[1:, 1:])


def test_only_files_that_hold_the_block_are_opened(tmp_path: Path, world) -> None:
    whole = {"model.w": torch.arange(12.0).reshape(4, 3)}
    world(2)(save_on_rank, tmp_path / "a", whole)
    (tmp_path / "a" / "model-00000-of-00002.safetensors").unlink()
    reader = checkpoint.Checkpoint(tmp_path / "a").reader(["model"])
    assert_same(reader.read("model.w", (2, 0), (2, 3)), whole["model.w"][2:])
    with pytest.raises(CheckpointError, match=r"model-00000-of-00002\.safetensors is missing"):
        reader.read("model.w", (1, 0), (2, 3))


def test_a_part_that_was_not_saved(tmp_path: Path) -> None:
    save_whole(tmp_path / "a", shards=[Shard("model.w", (2,), (0,), torch.ones(2))])
    with pytest.raises(CheckpointError, match="holds model, state, but not optimizer"):
        checkpoint.open(tmp_path / "a").reader(["model", "optimizer"])


def test_an_unknown_key_and_a_block_out_of_bounds(tmp_path: Path) -> None:
    save_whole(tmp_path / "a")
    reader = checkpoint.open(tmp_path / "a").reader(["model"])
    with pytest.raises(CheckpointError, match=r'no tensor \'model.unevn\'. Did you mean "model.uneven"'):
        reader.shape("model.unevn")
    with pytest.raises(CheckpointError, match=r"model.uneven has shape \(7, 3\)"):
        reader.read("model.uneven", (5, 0), (3, 3))
    with pytest.raises(CheckpointError, match=r"has no tensor 'optimizer\.mask'"):
        reader.read("optimizer.mask", (0,), (1,))


W = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard("model.w", (4, 3), (0, 0), W), Shard("model.w", (4, 3), (2, 0), W[2:])], "the pieces at .* overlap"),
        ([Shard("model.w", (4, 3), (0, 0), W), Shard("model.w", (4, 3), (0, 0), W)], "the pieces at .* overlap"),
        (
            [Shard("model.w", (4, 3), (0, 0), W[:3]), Shard("model.w", (4, 3), (2, 0), W[2:])],
            "the pieces at .* overlap",
        ),
        ([Shard("model.w", (4, 3), (0, 0), W[:3])], "model.w: the ranks' pieces hold 9 of the 12 elements"),
        ([Shard("model.w", (4, 3), (0, 0), W, replica=1)], "model.w: the ranks' pieces hold 0 of the 12 elements"),
        ([Shard("model.w", (4, 3), (2, 0), W)], r"\(4, 3\) at \(2, 0\) is no block of \(4, 3\)"),
        ([Shard("model.w", (4, 3), (0,), W)], "is no block of"),
        ([Shard("weights.w", (4, 3), (0, 0), W)], "keys begin with model. or optimizer."),
        ([Shard("model.w", (4, 3), (0, 0), W.to(torch.complex64))], "can't hold torch.complex64"),
        (
            [Shard("model.w", (4, 3), (0, 0), W[:2]), Shard("model.w", (4, 3), (2, 0), W[2:].double())],
            "shards of model.w disagree",
        ),
    ],
)
def test_shards_that_are_no_checkpoint_are_refused(tmp_path: Path, shards: list[Shard], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_whole(tmp_path / "step-20", shards=shards)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save_whole(tmp_path / "step-20", shards=[Shard("model.old", (2,), (0,), torch.ones(2))])
    save_whole(tmp_path / "step-20")
    assert checkpoint.open(tmp_path / "step-20").reader(["model"]).keys() >= {"model.even"}
    assert CheckpointStore(tmp_path).listing().leftovers == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-20"]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.contiguous().reshape(-1).view(torch.uint8).equal(expected.contiguous().reshape(-1).view(torch.uint8))
