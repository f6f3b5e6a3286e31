"""A causal language model from a Hugging Face folder's config: its structure, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engines.errors import ModelError
from engines.model_folder import read_config
from engines.models import attention
from engines.models.causal_lm import PackedCausalLM

_REMEDY = (
    "Any decoder-only causal language model built into transformers works whose token mixing is attention alone."
)


def build_causal_lm(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta"
) -> PackedCausalLM:
    """Build the model that `path`/config.json describes, with parameters of `dtype` on `device`.

    Called by an engine on every rank in `initialize`. On "meta" nothing is allocated: shard it, then
    `materialize`, then load weights. No hub is asked and no code from the folder is run.

    Raises `ModelError` for a folder without config.json, an architecture that transformers does not know, or
    one whose packed sequences cannot be kept apart.
    """
    config = _config(Path(path))
    attention.register()
    model = _model(Path(path), config, dtype, torch.device(device))
    _refuse(model)
    return PackedCausalLM(model)


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    raw = read_config(path)
    kind = raw.get("model_type")
    if "quantization_config" in raw:
        raise ModelError(f"{path} holds quantized weights, which cannot be trained", "Use the unquantized model.")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as cause:
        raise ModelError(
            f"{path}/config.json has model_type {kind!r}, which transformers cannot build: {cause}", _REMEDY
        ) from cause
    except Exception as cause:
        raise _unbuildable(path, cause) from cause
    config.use_cache = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # with it a model adds its auxiliary loss by itself
    return config


def _model(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=False
            )
    except ValueError as cause:
        raise ModelError(
            f"transformers builds no causal language model of type {config.model_type!r} here: {cause}", _REMEDY
        ) from cause
    except Exception as cause:
        raise _unbuildable(path, cause) from cause


def _unbuildable(path: Path, cause: Exception) -> ModelError:
    """For values that a model's own code stumbles over, each in its way: KeyError, ZeroDivisionError, ..."""
    reason = " ".join(str(cause).split())
    return ModelError(
        f"transformers builds no model from {path}/config.json: {type(cause).__name__}: {reason}",
        "Restore the config.json that the weights were saved with.",
    )


def _refuse(model: Any) -> None:
    name, text = type(model).__name__, model.config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it has an encoder"
    elif not getattr(text, "is_causal", True):
        reason = "its attention is not causal"
    elif model._is_stateful or others:
        kinds = f" ({', '.join(others)})" if others else ""
        reason = f"it has layers{kinds} that would carry one packed sequence into the next"
    elif getattr(text, "attention_chunk_size", None):
        reason = "it attends in chunks (attention_chunk_size)"
    elif not (model._supports_attention_backend and model._supports_flash_attn):
        reason = "transformers does not let its attention be replaced by one that keeps packed sequences apart"
    if reason:
        raise ModelError(f"{name} ({model.config.model_type}) cannot be trained here: {reason}", _REMEDY)
