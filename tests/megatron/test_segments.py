"""Rows of Megatron's tensors are those of Hugging Face's that its modules take them for; flat ranges as blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from engines.testing.tiny import tiny_config, tiny_folder
from engines.weights import PretrainedFolder
from engines_megatron.architectures import Architecture, read_architecture
from engines_megatron.weights.blocks import rectangles
from engines_megatron.weights.names import tensor_shapes
from engines_megatron.weights.segments import Segment, segments


def architecture(family: str, **overrides: object) -> Architecture:
    return read_architecture(tiny_config(family, **overrides).to_dict())


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_names_and_shapes_are_those_that_save_pretrained_writes(family: str, tmp_path: Path):
    folder = tiny_folder(tmp_path, family)
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert dict(tensor_shapes(read_architecture(PretrainedFolder(folder).config), "language_model")) == written


def test_dense_layers_of_a_mixture_are_named_so():
    names = tensor_shapes(architecture("qwen3_moe", mlp_only_layers=[0]), "language_model")
    assert names["model.layers.0.mlp.gate_proj.weight"] == (96, 64)
    assert names["model.layers.1.mlp.experts.7.gate_proj.weight"] == (32, 64)
    assert "model.layers.1.mlp.gate_proj.weight" not in names


def test_a_value_model_has_a_score_for_a_head():
    shapes = tensor_shapes(architecture("llama"), "value_model")
    assert shapes["score.weight"] == (1, 64)
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_each_query_group_is_its_queries_its_key_and_its_value(heads: tuple[int, int], kind: str):
    number, groups = heads
    model = architecture("qwen2", num_attention_heads=number, num_key_value_heads=groups, head_dim=8)
    q = torch.arange(number * 8)
    k, v = 1000 + torch.arange(groups * 8), 2000 + torch.arange(groups * 8)
    # the view that megatron's SelfAttention.get_query_key_value_tensors takes of linear_qkv's output
    wanted = torch.cat([q.view(groups, -1), k.view(groups, -1), v.view(groups, -1)], 1).flatten()

    parts = {
        f"model.layers.3.self_attn.{name}_proj.{kind}": rows for name, rows in zip("qkv", (q, k, v), strict=True)
    }
    found = segments(f"decoder.layers.3.self_attention.linear_qkv.{kind}", model)
    assert torch.cat([parts[s.name][s.first : s.first + s.rows] for s in found]).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("family", "key", "name", "rows"),
    [
        ("llama", "embedding.word_embeddings.weight", "model.embed_tokens.weight", 256),
        ("llama", "output_layer.weight", "lm_head.weight", 256),
        ("llama", "score.weight", "score.weight", 1),
        ("llama", "decoder.final_layernorm.weight", "model.norm.weight", 64),
        ("llama", "decoder.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight", 64),
        (
            "llama",
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "model.layers.1.input_layernorm.weight",
            64,
        ),
        ("llama", "decoder.layers.1.self_attention.linear_proj.weight", "model.layers.1.self_attn.o_proj.weight", 64),
        ("qwen3", "decoder.layers.1.self_attention.q_layernorm.weight", "model.layers.1.self_attn.q_norm.weight", 16),
        (
            "llama",
            "decoder.layers.1.pre_mlp_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight",
            64,
        ),
        (
            "llama",
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            "model.layers.1.post_attention_layernorm.weight",
            64,
        ),
        ("llama", "decoder.layers.1.mlp.linear_fc1.weight_w", "model.layers.1.mlp.gate_proj.weight", 96),
        ("llama", "decoder.layers.1.mlp.linear_fc1.weight_v", "model.layers.1.mlp.up_proj.weight", 96),
        ("llama", "decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight", 64),
        ("qwen3_moe", "decoder.layers.1.mlp.router.weight", "model.layers.1.mlp.gate.weight", 8),
        (
            "qwen3_moe",
            "decoder.layers.1.mlp.experts.experts.5.linear_fc1.weight_v",
            "model.layers.1.mlp.experts.5.up_proj.weight",
            32,
        ),
        ("mixtral", "decoder.layers.1.mlp.router.weight", "model.layers.1.block_sparse_moe.gate.weight", 8),
        *(
            (
                "mixtral",
                f"decoder.layers.1.mlp.experts.experts.5.{mine}",
                f"model.layers.1.block_sparse_moe.experts.5.{theirs}.weight",
                rows,
            )
            for mine, theirs, rows in (
                ("linear_fc1.weight_w", "w1", 96),
                ("linear_fc1.weight_v", "w3", 96),
                ("linear_fc2.weight", "w2", 64),
            )
        ),
    ],
)
def test_every_other_tensor_is_one_tensor(family: str, key: str, name: str, rows: int):
    assert segments(key, architecture(family)) == [Segment(name, 0, rows)]


@pytest.mark.parametrize("key", ["decoder.layers.0.mlp.linear_fc3.weight", "vision.weight"])
def test_an_unknown_tensor_is_refused(key: str):
    with pytest.raises(KeyError):
        segments(key, architecture("llama"))


@given(
    shape=st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 7), st.integers(1, 7))),
    data=st.data(),
)
def test_a_flat_range_is_at_most_three_blocks(shape: tuple[int, ...], data: st.DataObject):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = list(rectangles(shape, start, stop))

    blocks = [whole[tuple(slice(o, o + n) for o, n in zip(r.offset, r.shape, strict=True))] for r in found]
    assert torch.cat([whole.new_empty(0), *(block.flatten() for block in blocks)]).tolist() == list(
        range(start, stop)
    )
    assert [r.begin for r in found] == [int(block.flatten()[0]) for block in blocks]
    assert [r.end - r.begin for r in found] == [block.numel() for block in blocks]
    assert len(found) <= 3
