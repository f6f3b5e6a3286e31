"""Exports are what `save_pretrained` writes, stream, and fail on all ranks alike."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.errors import ModelError
from engines.testing.tiny import random_sequences, tiny_folder, tiny_model
from engines.weights import ModelFiles, PretrainedFolder, write_pretrained
from engines.weights.value_config import value_config
from support.checkpoints import save_whole


def stream_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """As an engine would: names of the state dict, a tied head left out."""
    tied = model.config.tie_word_embeddings
    return ((name, w) for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("source"), "llama_tied")


def export(source: Path, target: Path, **changes: Any) -> None:
    arguments = {"stream": stream_of(tiny_model("llama_tied")), "dtype": torch.float32, "is_writer": True}
    write_pretrained(**{**arguments, "source": ModelFiles.read(source), "target": target, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_folder_as_save_pretrained(tmp_path: Path, source: Path, dtype: torch.dtype) -> None:
    model = tiny_model("llama_tied")
    export(source, tmp_path / "export", dtype=dtype)
    model.to(dtype).save_pretrained(tmp_path / "expected")
    assert names_in(tmp_path / "export") == names_in(tmp_path / "expected")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "export" / name).read_text()) == json.loads(
            (tmp_path / "expected" / name).read_text()
        )
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "expected"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]) for name in ours)
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, source: Path) -> None:
    from transformers import AutoModelForCausalLM

    export(source, tmp_path / "export", max_shard_bytes=100_000)
    ids = torch.tensor(random_sequences([11]))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tiny_model("llama_tied")(ids).logits)


def test_shards_stay_within_the_limit_and_the_index_agrees(tmp_path: Path, source: Path) -> None:
    export(source, tmp_path / "export", max_shard_bytes=100_000)
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    shards = {file.name: load_file(file) for file in files}
    assert all(sum(w.nbytes for w in held.values()) <= 100_000 for held in shards.values())
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, held in shards.items() for name in held}
    tiny_model("llama_tied").save_pretrained(tmp_path / "expected", max_shard_size="100KB")
    expected = json.loads((tmp_path / "expected" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path, source: Path) -> None:
    export(source, tmp_path / "export", max_shard_bytes=1)
    weights = PretrainedFolder(tmp_path / "export")
    assert len(list((tmp_path / "export").glob("*.safetensors"))) == len(weights.keys())


def test_a_buffer_that_the_engine_reuses(tmp_path: Path, source: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    export(source, tmp_path / "export", stream=stream())
    assert {name: w.tolist() for name, w in load_file(tmp_path / "export" / "model.safetensors").items()} == {
        f"w{i}": [float(i)] * 4 for i in range(3)
    }


def test_integers_keep_their_dtype(tmp_path: Path, source: Path) -> None:
    export(source, tmp_path / "export", dtype=torch.bfloat16, stream=[("a", torch.arange(3)), ("b", torch.ones(3))])
    held = load_file(tmp_path / "export" / "model.safetensors")
    assert (held["a"].dtype, held["b"].dtype) == (torch.int64, torch.bfloat16)


def test_tokenizer_and_template_come_along_and_weights_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text('{"torch_dtype": "float16"}')
    kept = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"]
    kept += ["special_tokens_map.json", "tokenizer.model", "generation_config.json", "modeling_own.py"]
    kept += ["additional_chat_templates/rag.jinja"]
    left = [
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "trainer_state.json",
    ]
    for name in kept + left:
        (folder / name).write_text(name)
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    export(folder, tmp_path / "export", stream=[("w", torch.zeros(1))])
    assert names_in(tmp_path / "export") == {*kept, "config.json", "model.safetensors"}
    assert all((tmp_path / "export" / name).read_text() == name for name in kept)
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == {"dtype": "float32"}
    assert load_file(tmp_path / "export" / "model.safetensors")["w"].tolist() == [0.0]


def test_an_earlier_export_is_replaced_and_anything_else_is_not(tmp_path: Path, source: Path) -> None:
    export(source, tmp_path / "export", max_shard_bytes=100_000)
    (tmp_path / ".export.tmp-0123abcd").mkdir()
    export(source, tmp_path / "export")
    assert names_in(tmp_path / "export") == {"config.json", "generation_config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    elsewhere = (tmp_path / "export").rename(tmp_path / "elsewhere")
    (tmp_path / "export").symlink_to(elsewhere)
    export(source, tmp_path / "export")
    assert {path.name for path in tmp_path.iterdir()} == {"export", "elsewhere"}
    assert not (tmp_path / "export").is_symlink() and names_in(elsewhere)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ModelError, match="photos holds files, but no model"):
        export(source, tmp_path / "photos")
    with pytest.raises(ModelError, match=r"cat\.jpg is a file"):
        export(source, tmp_path / "photos" / "cat.jpg")
    (elsewhere / "checkpoints").mkdir()
    with pytest.raises(ModelError, match="elsewhere holds checkpoints beside a model, which an export would delete"):
        export(source, elsewhere)
    with pytest.raises(ModelError, match="is the model's own folder"):
        export(source, source)
    with pytest.raises(ModelError, match="is a URL"):
        export(source, "hf://me/model")  # type: ignore[arg-type]
    assert names_in(tmp_path / "photos") == {"cat.jpg"}


def test_a_checkpoint_is_not_replaced(tmp_path: Path, source: Path) -> None:
    save_whole(tmp_path / "step-20")
    assert (tmp_path / "step-20/config.json").exists(), "as in an export"
    with pytest.raises(ModelError, match="step-20 is a checkpoint, which an export would replace"):
        export(source, tmp_path / "step-20")
    assert (tmp_path / "step-20/manifest.json").exists()


@pytest.mark.parametrize(
    ("stream", "words"), [([], "sent no weights"), ([("w", torch.ones(1)), ("w", torch.ones(1))], "sent w twice")]
)
def test_streams_that_are_no_model(tmp_path: Path, source: Path, stream: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        export(source, tmp_path / "export", stream=stream)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_without_room_fails_all_ranks_after_the_stream(tmp_path: Path, source: Path, world) -> None:
    for message, drained in world(2)(export_without_room, source, tmp_path / "export"):
        assert drained == 20
        assert "rank 1: " in message and "File too large" in message
    assert list(tmp_path.iterdir()) == []


def export_without_room(source: Path, target: Path) -> tuple[str, int]:
    drained = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal drained
        for i in range(20):
            whole = torch.ones(1000)
            dist.all_reduce(whole)  # a rank that stops draining would leave the other here
            drained += 1
            yield f"w{i}", whole

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(ModelError) as caught:
            export(source, target, stream=stream(), is_writer=dist.get_rank() == 1, max_shard_bytes=8000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value), drained


def test_only_the_writer_writes(tmp_path: Path, source: Path, world) -> None:
    world(2)(export_on_rank, source, tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors")["w"].tolist() == [0.0]


def export_on_rank(source: Path, target: Path) -> None:
    rank = dist.get_rank()
    export(source, target, stream=[("w", torch.full((1,), float(rank)))], is_writer=rank == 0)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_value_model_needs_a_class_that_loads_it(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "granite")
    with pytest.raises(ModelError, match="transformers has none of model_type 'granite'"):
        export(source, tmp_path / "export", model_type="value_model")
    assert not (tmp_path / "export").exists()


def test_the_label_of_a_value_model_is_kept(source: Path) -> None:
    config = ModelFiles.read(source).config()
    labelled = value_config({**config, "id2label": {"0": "HELPFUL"}, "label2id": {"HELPFUL": 0}})
    assert labelled["id2label"] == {"0": "HELPFUL"}
    assert labelled["architectures"] == ["LlamaForSequenceClassification"]
    assert value_config({**config, "id2label": {"0": "YES", "1": "NO"}})["id2label"] == {"0": "LABEL_0"}
