"""The chunks of the model that this rank holds, without their weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from engines_megatron.architectures import Architecture
from engines_megatron.layout import Layout
from engines_megatron.model.attention import PackedCoreAttention
from engines_megatron.model.chunk import GPTChunk, frequencies
from engines_megatron.model.spec import decoder_spec, has_transformer_engine


def build_chunks(
    architecture: Architecture,
    layout: Layout,
    config: TransformerConfig,
    *,
    model_type: str,
    model_config: dict[str, Any],
    core_attention: type | None = PackedCoreAttention,
    device: torch.device,
) -> list[GPTChunk]:
    """Every chunk of this rank, on `device`, in order of depth; parameters hold what memory held.

    `model_config`: the folder's config.json; `core_attention`: see `decoder_spec`. All ranks call it, after the
    groups are made.
    """
    inverse, factor = frequencies(model_config, architecture.head_dim)
    if factor != 1.0:
        # Megatron's attention reads the factor on cosines and sines from here, as YaRN's 0.1 * ln(scale) + 1
        config.yarn_rotary_scaling_factor = math.exp(10 * (factor - 1))
    chunks = []
    for number in range(layout.virtual_pipeline):
        vp_stage = number if layout.virtual_pipeline > 1 else None
        chunk = GPTChunk(
            model_type=model_type,
            vocab_size=architecture.vocab_size,
            padded_vocab_size=layout.padded_vocab_size,
            pad_token=architecture.pad_token,
            config=config,
            transformer_layer_spec=decoder_spec(
                config,
                transformer_engine=device.type == "cuda" and has_transformer_engine(),
                core_attention=core_attention,
                vp_stage=vp_stage,
            ),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied and model_type == "language_model",
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        chunk.rotary_pos_emb.inv_freq = inverse.to(device)
        _mark_split_weights(chunk)
        _mark_experts(chunk)
        chunks.append(_moved(chunk, device))
    return chunks


def _moved(chunk: GPTChunk, device: torch.device) -> GPTChunk:
    """The chunk on `device`, with the marks on its parameters.

    Moved to a device whose tensors can't take the place of the CPU's (an NPU), a parameter becomes another, and
    Megatron's marks, such as `sequence_parallel`, are attributes of the old one.
    """
    marks = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
    chunk.to(device)
    for name, parameter in chunk.named_parameters():
        vars(parameter).update(marks[name])
    return chunk


def _mark_split_weights(chunk: GPTChunk) -> None:
    """Say which weights are split over tensor-parallel ranks, so that the gradient norm counts each element once.

    Megatron does so while it initialises weights, which is spared here, as they are loaded.
    """
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=1, stride=1)


def _mark_experts(chunk: GPTChunk) -> None:
    """Have experts' gradients summed over all ranks that hold the same experts.

    Megatron marks them so under expert parallelism alone. Without, tensor-parallel ranks that hold the same whole
    experts, and see other tokens by sequence parallelism, would each keep a gradient of their own.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
