"""Tiny random models of many families, saved as a user would have them: `save_pretrained`, safetensors.

Hidden 64, 2 layers, vocabulary 256; weights scaled so that attention and routers do real work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SEED = 0
VOCAB = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_scaled": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "qwen3_moe_dense_first": {
        "model_type": "qwen3_moe",
        **_MOE,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "mlp_only_layers": [0, 1, 2],
    },
    "mixtral": {"model_type": "mixtral", **_MOE},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "phi3": {"model_type": "phi3"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gpt_oss": {"model_type": "gpt_oss", **_MOE, "sliding_window": 7},
    "granite": {"model_type": "granite", "logits_scaling": 3.0},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "olmo2": {"model_type": "olmo2"},
    "gpt_neox": {"model_type": "gpt_neox"},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Config of each family, by the name that tests use; keys that `_COMMON` has are overridden."""

REFERENCE_FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe")
"""Those that every engine is held to."""


def tiny_config(family: str, *, tied: bool | None = None, **overrides: Any) -> Any:
    """The transformers config of `family`; `llama_tied` is llama with `tied=True`; `tied=None`: the family's way."""
    from transformers import AutoConfig

    if family.endswith("_tied"):
        family, tied = family.removesuffix("_tied"), True
    own = FAMILIES[family]
    common = {} if "n_embd" in own else _COMMON
    settings = {**common, **own, **({} if tied is None else {"tie_word_embeddings": tied}), **overrides}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def tiny_model(family: str, *, tied: bool | None = None, seed: int = SEED, **overrides: Any) -> Any:
    """A float32 model of `family` on the CPU in eval mode, with random weights that depend on `seed` alone."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, tied=tied, **overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            # norms (and other vectors that start at 1) stay near 1; matrices get the usual fan-in scale
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
        model.tie_weights()
    return model.eval()


def tiny_folder(
    tmp: Path,
    family: str,
    *,
    tied: bool | None = None,
    seed: int = SEED,
    shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Save `tiny_model(...)` below `tmp` and return the folder; no tokenizer. A small `shard_size` ("100KB")
    splits the weights over several files with an index."""
    folder = Path(tmp) / f"{family}-{'tied-' if tied else ''}{seed}"
    tiny_model(family, tied=tied, seed=seed, **overrides).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def random_sequences(lengths: list[int], *, seed: int = 1, vocab: int = VOCAB) -> list[list[int]]:
    """Token ids of sequences with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
