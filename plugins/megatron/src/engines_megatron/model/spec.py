"""Which module stands where in a decoder: TransformerEngine's where it is on CUDA, else Megatron's plain ones.

Of the plain ones two are the project's own: Megatron's RMSNorm refuses sequence parallelism, and its core
attention packed sequences and context parallelism, unless somebody has patched it.
"""

from __future__ import annotations

from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from engines_megatron.model.attention import PackedCoreAttention
from engines_megatron.model.norm import RMSNorm
from engines_megatron.model.router import Router


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed; what it lacks on this machine shows when it is imported."""
    return find_spec("transformer_engine") is not None


def decoder_spec(
    config: TransformerConfig,
    *,
    transformer_engine: bool,
    core_attention: type | None = PackedCoreAttention,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """The spec of the decoder layers that this rank's chunk holds.

    `core_attention`: what stands for Megatron's own in plain layers; None leaves that.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    seen: set[int] = set()
    for layer in block.layer_specs:
        if id(layer) not in seen:
            seen.add(id(layer))
            _use_own_modules(layer, plain=not transformer_engine, core_attention=core_attention)
    if not transformer_engine:
        block.layer_norm = RMSNorm
    return block


def _use_own_modules(layer: ModuleSpec, *, plain: bool, core_attention: type | None) -> None:
    modules = layer.submodules
    experts = modules.mlp.submodules
    if isinstance(experts, MoESubmodules):
        experts.router = Router
    if not plain:
        return
    attention = modules.self_attention.submodules
    modules.input_layernorm = RMSNorm
    modules.pre_mlp_layernorm = RMSNorm
    if core_attention is not None:
        attention.core_attention = core_attention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, RMSNorm)
