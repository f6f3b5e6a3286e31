"""Which checkpoints there are is read from the disk, and the last complete one stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.checkpoint import CheckpointStore, ModelFingerprint, compare, fingerprint
from engines.errors import CheckpointError
from support.checkpoints import info, save_whole


def store_with(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        save_whole(store.path(step), step=step)
    return store


def test_an_absent_and_an_empty_folder(tmp_path: Path) -> None:
    for store in (CheckpointStore(tmp_path / "absent"), CheckpointStore(tmp_path)):
        assert (store.steps(), store.latest(), store.clean_up(), store.retain(1)) == ([], None, [], [])


def test_steps_are_numbers(tmp_path: Path) -> None:
    store = store_with(tmp_path, 100, 9, 0)
    assert store.steps() == [0, 9, 100]
    assert store.latest() == tmp_path / "step-100"


def test_latest_is_the_last_complete_one(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20, 30, 40)
    (tmp_path / "step-40" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-30" / "model-00000-of-00001.safetensors", 100)
    (tmp_path / "step-050").mkdir()
    (tmp_path / "notes.txt").touch()
    assert CheckpointStore(tmp_path).latest() == tmp_path / "step-20"
    listing = store.listing()
    assert list(listing.damaged) == [tmp_path / "step-30"]
    assert "model-00000-of-00001.safetensors has 100 bytes" in listing.damaged[tmp_path / "step-30"]
    assert listing.unfinished == [tmp_path / "step-40"]


def test_a_checkpoint_under_the_name_of_another_step(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10)
    (tmp_path / "step-10").rename(tmp_path / "step-11")
    assert store.latest() is None
    assert "is the checkpoint of step 10" in store.listing().damaged[tmp_path / "step-11"]


def test_retention_counts_what_earlier_processes_wrote(tmp_path: Path) -> None:
    store_with(tmp_path, 10, 20, 30)
    store = store_with(tmp_path, 40)
    assert store.retain(2) == [tmp_path / "step-10", tmp_path / "step-20"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-30", "step-40"]
    assert store.retain(2) == []


def test_retention_never_counts_a_damaged_one(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20, 30)
    os.truncate(tmp_path / "step-30" / "optimizer-00000-of-00001.safetensors", 8)
    assert store.retain(1) == [tmp_path / "step-10"]
    assert store.latest() == tmp_path / "step-20"
    assert (tmp_path / "step-30").exists()


def test_a_checkpoint_that_lies_elsewhere_is_kept_there(tmp_path: Path) -> None:
    """As where somebody made room: the link is deleted, also one that an earlier version could not."""
    store = store_with(tmp_path / "checkpoints", 10, 20)
    elsewhere = store.path(10).rename(tmp_path / "elsewhere")
    for link in (store.path(10), store.folder / ".step-5.removed-0123abcd"):
        link.symlink_to(elsewhere)
    assert store.retain(1) == [store.path(10)]
    assert store.clean_up() == [f"{store.folder}/.step-5.removed-0123abcd: removed, a deleted checkpoint"]
    assert [path.name for path in store.folder.iterdir()] == ["step-20"]
    assert (elsewhere / "manifest.json").exists()


def test_what_can_not_be_removed_is_named(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10)
    left = tmp_path / ".step-20.tmp-0123abcd"
    left.touch()
    with pytest.raises(CheckpointError, match=r"step-20\.tmp-0123abcd, left of .* can't be cleaned up: Not a direct"):
        store.clean_up()


def test_retention_of_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        store_with(tmp_path, 10).retain(0)
    assert CheckpointStore(tmp_path).steps() == [10]


def test_leftovers_are_removed_and_mentioned(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10)
    (tmp_path / ".step-20.tmp-0123abcd").mkdir()
    (tmp_path / ".step-20.tmp-0123abcd" / "state.json").touch()
    (tmp_path / ".step-5.removed-0123abcd").mkdir()
    (tmp_path / ".cache").mkdir()
    save_whole(tmp_path / "step-30", step=30)
    (tmp_path / "step-30" / "manifest.json").unlink()
    (tmp_path / "step-40").mkdir()
    (tmp_path / "step-50").mkdir()
    (tmp_path / "step-50" / "notes.txt").touch()
    mentioned = store.clean_up()
    assert len(mentioned) == 4
    assert f"{tmp_path}/step-30: moved to step-30.incomplete-1, since it has no manifest.json" in mentioned[0]
    assert f"{tmp_path}/step-40: removed, an empty folder" in mentioned[1]
    assert ".step-20.tmp-0123abcd: removed, a checkpoint that was never finished" in mentioned[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".cache", "step-10", "step-30.incomplete-1", "step-50",
    ]  # fmt: skip
    assert (tmp_path / "step-30.incomplete-1" / "index.json").exists(), "it may have been complete"
    assert list(store.listing().damaged) == [tmp_path / "step-50"]


def test_what_was_replaced_by_nothing_is_put_back(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    (tmp_path / "step-20").rename(tmp_path / ".step-20.replaced-0123abcd")
    assert store.latest() == tmp_path / "step-10"
    assert "step-20: put back" in store.clean_up()[0]
    assert store.latest() == tmp_path / "step-20"


def test_nothing_differs_from_the_same_run_at_another_layout() -> None:
    assert compare(info(step=3, world_size=4), info(world_size=2, device="cuda", distributions={})) == []


def test_every_difference_is_listed() -> None:
    other = ModelFingerprint(
        config={"architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "rope": {"theta": 1e6}}, tokenizer_xxh3=None
    )
    differences = compare(
        info(),
        info(
            backend="megatron",
            model=other,
            model_type="value_model",
            optimizer={"lr": 2e-3, "betas": [0.9, 0.999]},
        ),
    )
    assert differences == [
        "engine: fsdp2 in the checkpoint, megatron in this run",
        "model.architectures: ['LlamaForCausalLM'] in the checkpoint, ['Qwen3ForCausalLM'] in this run",
        "model.vocab_size: 256 in the checkpoint, 512 in this run",
        "model.rope.theta: 10000.0 in the checkpoint, 1000000.0 in this run",
        "model_type: language_model in the checkpoint, value_model in this run",
        "vocabulary (tokenizer.json): 00ff in the checkpoint, nothing in this run",
        "optimizer.lr: 0.001 in the checkpoint, 0.002 in this run",
    ]
    assert compare(info(optimizer=None), info())[0].startswith("optimizer: nothing in the checkpoint")
    saved, current = (info(optimizer=settings) for settings in ({}, {"decay": None}))
    assert compare(saved, current) == ["optimizer.decay: nothing in the checkpoint, null in this run"]


def test_a_fingerprint_is_of_what_decides_the_weights() -> None:
    first = fingerprint({"architectures": ["A"], "dtype": "float32", "hidden_size": 4}, None)
    assert first == ModelFingerprint(config={"architectures": ["A"], "hidden_size": 4}, tokenizer_xxh3=None)
    assert first.architecture == "A"
    again = fingerprint({"hidden_size": 4, "architectures": ["A"], "dtype": "bfloat16"}, b"{}")
    assert again.config == first.config
    assert again.tokenizer_xxh3 is not None
