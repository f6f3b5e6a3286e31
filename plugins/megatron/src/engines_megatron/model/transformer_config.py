"""Megatron's TransformerConfig for an architecture at a layout."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig

from engines_megatron.architectures import Architecture
from engines_megatron.config import MegatronConfig
from engines_megatron.layout import Layout


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    config: MegatronConfig,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
) -> TransformerConfig:
    """What Megatron's modules and schedules read.

    Fusions that need kernels of TransformerEngine or Apex are off. Gradients of micro-batches are summed, see
    `schedule`; auxiliary losses of routers are the project's own, see `model.router`.
    """
    settings = {
        **_model(architecture, dtype),
        **_layout(layout),
        **(_experts(architecture) if architecture.experts is not None else {}),
        **(_recompute(config) if config.activation_checkpointing else {}),
    }
    built = TransformerConfig(
        **settings,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default is a spelling that Megatron itself warns of
    )
    built.finalize_model_grads_func = finalize_model_grads
    return built


def _model(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        # micro-batches of packed sequences differ in rows; that mode wants this dispatcher, of dense models too
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if layout.pipeline == 1:
        return sizes
    chunks = [["decoder"] * layers for layers in layout.chunk_layers]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    sizes |= {"pipeline_model_parallel_size": layout.pipeline, "pipeline_model_parallel_layout": chunks}
    if layout.virtual_pipeline > 1:
        # the one mode in which interleaving is right with micro-batches of different rows: batched calls mix up
        # the messages between two ranks or hang, unbatched ones without overlap abort
        sizes |= {
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return sizes


def _experts(architecture: Architecture) -> dict[str, Any]:
    experts = architecture.experts
    assert experts is not None
    return {
        "num_moe_experts": experts.number,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(is_mixture) for is_mixture in experts.layers],
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
