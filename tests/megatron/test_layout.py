"""Layouts: every layer in one chunk, every rank in one place, and no more padding than needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines.errors import ConfigError
from engines_megatron.architectures import Architecture, Experts
from engines_megatron.config import MegatronConfig
from engines_megatron.layout import plan_layout

DENSE = Architecture(
    model_type="llama",
    num_layers=12,
    hidden_size=64,
    ffn_hidden_size=48,
    num_heads=24,
    num_kv_heads=12,
    head_dim=8,
    vocab_size=251,
    max_position_embeddings=256,
    norm_eps=1e-5,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    initializer_range=0.02,
    pad_token=None,
    experts=None,
)
MIXTURE = replace(DENSE, experts=Experts(8, 2, 24, True, (False, *[True] * 11)))
small = st.integers(1, 6)


def pipeline(stages: int, per_stage: int, **settings: object) -> MegatronConfig:
    return MegatronConfig(pipeline_parallel_size=stages, virtual_pipeline_parallel_size=per_stage, **settings)


@settings(deadline=None)
@given(layers=st.integers(1, 60), stages=small, per_stage=small)
def test_chunks_are_as_even_as_possible(layers: int, stages: int, per_stage: int) -> None:
    assume(stages * per_stage <= layers and (stages > 1 or per_stage == 1))
    chunks = plan_layout(pipeline(stages, per_stage), replace(DENSE, num_layers=layers), stages).chunk_layers
    assert len(chunks) == stages * per_stage
    assert sum(chunks) == layers
    assert max(chunks) - min(chunks) <= 1
    assert list(chunks) == sorted(chunks, reverse=True)


@settings(deadline=None)
@given(layers=st.integers(1, 10), stages=small, per_stage=small)
def test_chunks_without_layers_are_refused(layers: int, stages: int, per_stage: int) -> None:
    assume(stages > 1 and stages * per_stage > layers)
    with pytest.raises(ConfigError, match=rf"need {stages * per_stage} decoder layers .* has {layers}\."):
        plan_layout(pipeline(stages, per_stage), replace(DENSE, num_layers=layers), stages)


@settings(deadline=None)
@given(given_layers=st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_given_numbers_of_layers_are_kept(given_layers: list[int]) -> None:
    stages, layers = len(given_layers), sum(given_layers)
    config = pipeline(stages, 1, pipeline_layers=given_layers)
    assert plan_layout(config, replace(DENSE, num_layers=layers), stages).chunk_layers == tuple(given_layers)
    with pytest.raises(ConfigError, match=f"adds up to {layers} "):
        plan_layout(config, replace(DENSE, num_layers=layers + 1), stages)


@settings(deadline=None)
@given(vocabulary=st.integers(1, 5000), tensor=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_vocabularies_are_padded_as_little_as_possible(vocabulary: int, tensor: int) -> None:
    layout = plan_layout(MegatronConfig(tensor_parallel_size=tensor), replace(DENSE, vocab_size=vocabulary), tensor)
    assert layout.padded_vocab_size % tensor == 0
    assert 0 <= layout.padded_vocab_size - vocabulary < tensor


@settings(deadline=None)
@given(
    tensor=st.integers(1, 4),
    context=st.integers(1, 3),
    stages=st.integers(1, 4),
    expert=st.sampled_from([1, 2, 4, 8]),
    expert_tensor=st.sampled_from([1, 2, 3]),
    world=st.integers(1, 64),
)
def test_the_world_is_what_megatron_can_factor(
    tensor: int, context: int, stages: int, expert: int, expert_tensor: int, world: int
) -> None:
    """As `initialize_model_parallel` counts: once for attention, once for experts."""
    config = MegatronConfig(
        tensor_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        context_parallel_size=context,
        pipeline_parallel_size=stages,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    sizes = tensor * context * stages, expert_tensor * expert * stages
    if any(world % size for size in sizes):
        with pytest.raises(ConfigError, match=rf"Start a multiple of {math.lcm(*sizes)} \(launch.nproc\)\."):
            plan_layout(config, MIXTURE, world)
        return
    layout = plan_layout(config, MIXTURE, world)
    assert layout.data * sizes[0] == world
    assert (layout.tensor, layout.context, layout.pipeline) == (tensor, context, stages)
    assert (layout.expert, layout.expert_tensor) == (expert, expert_tensor)
    assert layout.sequence_parallel is (tensor > 1)


@settings(deadline=None)
@given(size=st.integers(1, 60))
def test_sizes_that_work_do(size: int) -> None:
    """What a refusal offers is accepted, and nothing else is."""
    offered = {1, 2, 3, 4, 6, 12}
    if size in offered:
        assert plan_layout(MegatronConfig(tensor_parallel_size=size), DENSE, size).tensor == size
        return
    with pytest.raises(ConfigError) as error:
        plan_layout(MegatronConfig(tensor_parallel_size=size), DENSE, size)
    assert f"Sizes that work: {', '.join(map(str, sorted(offered)))}." in str(error.value)
