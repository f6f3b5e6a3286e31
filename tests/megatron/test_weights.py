"""Weights go into Megatron's modules where those expect them, and come out as they were, at every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.errors import ModelError
from engines.testing.tiny import tiny_folder
from engines.testing.world import World
from support.chunks import built
from support.megatron import FAMILIES, LAYOUTS, MIXTURES, fits, settings

Worlds = Callable[[int], World]
SAMPLE = {("llama", "tp2"), ("llama_tied", "pp2 vpp2"), ("llama_tied", "tp2 pp2"), ("qwen2", "tp2 cp2")}
SAMPLE |= {("qwen3", "tp2 sp"), ("llama", "pp4 uneven"), ("mixtral", "tp2 ep2"), ("qwen3_moe", "tp2 etp2")}
SAMPLE |= {("qwen3_moe_dense_first", "pp2 ep2"), ("qwen3_moe", "ep2"), ("mixtral", "single"), ("qwen2", "single")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[Any, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = family, *sorted(overrides.items())
        if key not in made:
            if family == "qwen3_moe_dense_first":
                made[key] = get("qwen3_moe", mlp_only_layers=(0, 1, 2), **overrides)
            else:
                overrides = {"num_hidden_layers": 5, **overrides}
                if "mlp_only_layers" in overrides:
                    overrides["mlp_only_layers"] = list(overrides["mlp_only_layers"])
                made[key] = tiny_folder(tmp_path_factory.mktemp("model"), family, **overrides)
        return made[key]

    return get


def load_and_export(folder: Path, how: dict[str, Any], model_type: str, dtype: str) -> dict[str, Tensor]:
    """On each rank, in the order of the stream."""
    from engines_megatron.weights import export_weights

    with built(folder, how, model_type=model_type) as model:
        model.load()
        return dict(export_weights(model.chunks, model.architecture, getattr(torch, dtype)))


def assert_round_trip(
    world: World, folder: Path, how: dict[str, Any], model_type: str = "language_model", dtype: str = "float32"
) -> list[str]:
    """Every rank streams the folder's tensors, bit by bit; returns their order."""
    wanted = load_file(folder / "model.safetensors")
    exports = world(load_and_export, folder, how, model_type, dtype)
    for export in exports:
        assert export.keys() == wanted.keys()
        assert [name for name in wanted if not export[name].equal(wanted[name].to(getattr(torch, dtype)))] == []
    assert all(list(export) == list(exports[0]) for export in exports)
    return list(exports[0])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in SAMPLE else pytest.mark.more)
        for place, family in enumerate(FAMILIES)
        for turn, layout in enumerate(LAYOUTS)
        if fits(family, layout) and ((family, layout) in SAMPLE or (place + turn) % 2)
    ],
)
def test_what_is_loaded_is_exported_to_the_bit(family: str, layout: str, folders: Callable[..., Path], world: Worlds):
    assert_round_trip(world(LAYOUTS[layout].processes), folders(family), settings(layout))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.more), True])
def test_a_vocabulary_that_is_not_divided_is_filled_up_and_cut_again(
    tensor: int, pipeline: int, tied: bool, folders: Callable[..., Path], world: Worlds
):
    folder = folders(
        "llama", tied=tied, vocab_size=251, hidden_size=96, num_attention_heads=12, num_key_value_heads=12
    )
    how = {"strategy": "megatron", "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    assert_round_trip(world(tensor * pipeline), folder, how)


def test_a_rank_may_hold_nothing_but_filling(folders: Callable[..., Path], world: Worlds):
    folder = folders("llama", vocab_size=5, num_attention_heads=4, num_key_value_heads=4)
    assert_round_trip(world(4), folder, {"strategy": "megatron", "tensor_parallel_size": 4})


def test_nine_heads_of_which_three_are_keys(folders: Callable[..., Path], world: Worlds):
    folder = folders("llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8, tied=True)
    assert_round_trip(world(3), folder, {"strategy": "megatron", "tensor_parallel_size": 3})


def test_the_stream_is_in_order_of_depth_and_in_the_dtype_asked_for(folders: Callable[..., Path], world: Worlds):
    order = assert_round_trip(world(2), folders("llama"), settings("pp2"), dtype="bfloat16")
    layers = [int(name.split(".")[2]) for name in order if name.startswith("model.layers.")]
    assert order[0] == "model.embed_tokens.weight"
    assert layers == sorted(layers)
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]


def where_modules_hold_them(folder: Path, how: dict[str, Any]) -> list[str]:
    """Names of tensors that lie elsewhere than Megatron's modules take them from, by the text of its classes."""
    from megatron.core import parallel_state as state
    from torch.nn.functional import pad

    def cut(tensor: Tensor, size: int, rank: int, dim: int = 0) -> Tensor:
        return tensor.chunk(size, dim)[rank]

    tensors, wrong = load_file(folder / "model.safetensors"), []
    with built(folder, how) as model:
        model.load()
        tp, tp_rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
        etp, etp_rank = state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
        groups = model.architecture.num_kv_heads

        def check(name: str, parameter: Tensor, wanted: Tensor) -> None:
            if not parameter.equal(wanted):
                wrong.append(name)

        def check_mlp(at: str, mlp: Any, names: tuple[str, str, str], size: int, rank: int) -> None:
            gate, up, down = (tensors[f"{at}.{name}.weight"] for name in names)
            check(at, mlp.linear_fc1.weight, torch.cat([cut(gate, size, rank), cut(up, size, rank)]))
            check(at, mlp.linear_fc2.weight, cut(down, size, rank, 1))

        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                at = f"model.layers.{layer.layer_number - 1}"
                parts = [tensors[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"]
                whole = torch.cat([part.view(groups, -1, part.shape[1]) for part in parts], 1).flatten(0, 1)
                attention = layer.self_attention
                check(at, attention.linear_qkv.weight, cut(whole, tp, tp_rank))
                check(at, attention.linear_proj.weight, cut(tensors[f"{at}.self_attn.o_proj.weight"], tp, tp_rank, 1))
                check(at, layer.input_layernorm.weight, tensors[f"{at}.input_layernorm.weight"])
                if not hasattr(layer.mlp, "router"):
                    check_mlp(f"{at}.mlp", layer.mlp, ("gate_proj", "up_proj", "down_proj"), tp, tp_rank)
                    continue
                of_mixtral = model.architecture.model_type == "mixtral"
                at = f"{at}.block_sparse_moe" if of_mixtral else f"{at}.mlp"
                names = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
                check(at, layer.mlp.router.weight, tensors[f"{at}.gate.weight"])
                experts = layer.mlp.experts.local_experts
                first = len(experts) * state.get_expert_model_parallel_rank()
                for number, expert in enumerate(experts):
                    check_mlp(f"{at}.experts.{first + number}", expert, names, etp, etp_rank)
            if chunk.pre_process:
                embedding = tensors["model.embed_tokens.weight"]
                rows = chunk.embedding.word_embeddings.weight
                filled = pad(embedding, (0, 0, 0, len(rows) * tp - len(embedding)))
                check("embedding", rows, cut(filled, tp, tp_rank))
            if chunk.post_process:
                head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
                rows = chunk.shared_embedding_or_output_weight()
                rows = chunk.output_layer.weight if chunk.output_layer.weight is not None else rows
                filled = pad(head, (0, 0, 0, len(rows) * tp - len(head)))
                check("head", rows, cut(filled, tp, tp_rank))
                check("norm", chunk.decoder.final_layernorm.weight, tensors["model.norm.weight"])
    return wrong


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "tp2 pp2"),
        ("llama_tied", "tp2 pp2"),
        ("llama", "pp2 vpp2"),
        ("qwen3_moe_dense_first", "pp2 ep2"),
        ("mixtral", "tp2 ep2"),
        ("qwen3_moe", "tp2 etp2"),
    ],
)
def test_modules_find_their_weights(family: str, layout: str, folders: Callable[..., Path], world: Worlds):
    folder = folders(family, **({} if family in MIXTURES else {"vocab_size": 251}))
    assert world(LAYOUTS[layout].processes)(where_modules_hold_them, folder, settings(layout)) == (
        [[]] * LAYOUTS[layout].processes
    )


def count_reads(folder: Path, how: dict[str, Any]) -> tuple[int, int]:
    """Elements that loading read on this rank, and those of its parameters."""
    from engines.weights.safetensors_file import SafetensorsFile

    read, sizes = SafetensorsFile.read, []

    def counting(self: SafetensorsFile, name: str, index: Any = None) -> Tensor:
        tensor = read(self, name, index)
        sizes.append(tensor.numel())
        return tensor

    SafetensorsFile.read = counting
    try:
        with built(folder, how) as model:
            model.load()
            return sum(sizes), sum(p.numel() for chunk in model.chunks for p in chunk.parameters())
    finally:
        SafetensorsFile.read = read


@pytest.mark.parametrize("layout", ["tp2 ep2", "pp2 vpp2", "pp2 ep2"])
def test_a_rank_reads_what_it_holds_and_nothing_else(layout: str, folders: Callable[..., Path], world: Worlds):
    counts = world(LAYOUTS[layout].processes)(count_reads, folders("qwen3_moe"), settings(layout))
    assert all(read == held for read, held in counts)


def edited(folder: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of the folder with other weights."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def load_error(folder: Path, how: dict[str, Any], model_type: str = "language_model") -> str:
    with built(folder, how, model_type=model_type) as model:
        try:
            model.load()
        except ModelError as error:
            return str(error)
    raise AssertionError("it loaded")


def test_what_does_not_fit_is_named_on_every_rank(folders: Callable[..., Path], world: Worlds, tmp_path: Path):
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.4.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    folder = edited(folders("llama"), tmp_path / "spoilt", spoil)
    for message in world(2)(load_error, folder, settings("pp2")):
        assert str(folder) in message
        assert "missing: model.layers.4.mlp.up_proj.weight" in message
        assert "unexpected: model.layers.9.mlp.up_proj.weight" in message
        assert "wrong shape: model.norm.weight has shape [3], the model's is [64]" in message
        assert "inv_freq" not in message


def test_an_untied_folder_needs_a_head(folders: Callable[..., Path], world: Worlds, tmp_path: Path):
    folder = edited(folders("llama"), tmp_path / "headless", lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing: lm_head.weight" in world(1)(load_error, folder, settings("single"))[0]


def test_a_tied_folder_may_hold_its_embedding_twice(folders: Callable[..., Path], world: Worlds, tmp_path: Path):
    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differently(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    source = folders("llama_tied")
    wanted = load_file(source / "model.safetensors")
    export = world(2)(
        load_and_export, edited(source, tmp_path / "twice", twice), settings("pp2"), "language_model", "float32"
    )[0]
    assert export.keys() == wanted.keys()
    assert export["model.embed_tokens.weight"].equal(wanted["model.embed_tokens.weight"])
    folder = edited(source, tmp_path / "differently", differently)
    for message in world(2)(load_error, folder, settings("pp2")):
        assert "ties lm_head.weight to model.embed_tokens.weight" in message


def test_a_tied_embedding_may_be_stored_as_the_head(folders: Callable[..., Path], world: Worlds, tmp_path: Path):
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    source = folders("llama_tied")
    export = world(2)(
        load_and_export, edited(source, tmp_path / "renamed", rename), settings("pp2"), "language_model", "float32"
    )[0]
    assert export["model.embed_tokens.weight"].equal(
        load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_may_be_stacked_as_modules_of_transformers_hold_them(
    family: str, folders: Callable[..., Path], world: Worlds, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    source = folders(family)
    parameters = dict(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).named_parameters())
    assert any(name.endswith("experts.gate_up_proj") for name in parameters)

    def stack(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update({name: parameter.detach() for name, parameter in parameters.items()})

    wanted = load_file(source / "model.safetensors")
    folder = edited(source, tmp_path / "stacked", stack)
    for export in world(2)(load_and_export, folder, settings("tp2 ep2"), "language_model", "float32"):
        assert export.keys() == wanted.keys()
        assert all(export[name].equal(tensor) for name, tensor in wanted.items())


def load_seeded(folder: Path, how: dict[str, Any], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    torch.rand(torch.distributed.get_rank() + 1)  # what was drawn since the seed doesn't count
    return load_and_export(folder, how, "value_model", "float32")


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_value_model_of_a_language_model_has_the_same_new_head_everywhere(
    family: str, folders: Callable[..., Path], world: Worlds, tmp_path: Path
):
    folder = folders(family)
    wanted = load_file(folder / "model.safetensors")
    wanted.pop("lm_head.weight", None)
    heads = []
    for layout in ("single", "pp2 vpp2", "tp2 pp2"):
        for export in world(LAYOUTS[layout].processes)(load_seeded, folder, settings(layout), 3):
            heads.append(export.pop("score.weight"))
            assert export.keys() == wanted.keys()
            assert all(export[name].equal(tensor) for name, tensor in wanted.items())
    assert all(head.equal(heads[0]) for head in heads)
    assert heads[0].shape == (1, 64)
    assert 0.01 < heads[0].std() < 0.03
    other = world(1)(load_seeded, folder, settings("single"), 4)[0]["score.weight"]
    assert not other.equal(heads[0])

    def give_score(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        tensors["score.weight"] = torch.arange(64.0)[None]

    own = edited(folder, tmp_path / "value", give_score)
    assert_round_trip(world(2), own, settings("pp2"), "value_model")


def test_a_language_model_does_not_load_from_a_value_models_export(
    folders: Callable[..., Path], world: Worlds, tmp_path: Path
):
    def give_score(tensors: dict[str, Tensor]) -> None:
        tensors["score.weight"] = tensors.pop("lm_head.weight")[:1]

    folder = edited(folders("llama"), tmp_path / "value", give_score)
    message = world(1)(load_error, folder, settings("single"))[0]
    assert "missing: lm_head.weight; unexpected: score.weight" in message
