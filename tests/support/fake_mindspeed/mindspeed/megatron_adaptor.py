"""Patches Megatron-Core while it is imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401

from mindspeed import events, transformer_engine
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed.redirect import redirect

ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"


def repatch(arguments: dict[str, Any]) -> None:
    events.append(("repatch", dict(arguments)))
    MindSpeedPatchesManager.remove()
    vars(get_mindspeed_args()).update(arguments)
    _patch()


def _patch() -> None:
    args, register = get_mindspeed_args(), MindSpeedPatchesManager.register
    from mindspeed.attention import RingAttention, flash_attention

    register("megatron.core.transformer.transformer_config.TransformerConfig.__post_init__", _with_defaults)
    if getattr(args, "context_parallel_size", 1) > 1:
        register(ATTENTION, lambda _: RingAttention)
        register("megatron.core.parallel_state.initialize_model_parallel", _noting_groups)
    elif getattr(args, "use_flash_attn", False) and not os.environ.get("FAKE_MINDSPEED_FORGETS_FLASH"):
        register(f"{ATTENTION}.forward", lambda _: flash_attention)
    MindSpeedPatchesManager.apply()


def _with_defaults(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def with_defaults(self: Any) -> None:
        for name, value in vars(get_mindspeed_args(get_defaults=True)).items():
            if not hasattr(self, name):
                setattr(self, name, value)
        post_init(self)

    return with_defaults


def _noting_groups(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def noting_groups(*args: Any, **kwargs: Any) -> Any:
        events.append(("groups", kwargs["context_parallel_size"]))
        return initialize(*args, **kwargs)

    return noting_groups


def _uncompiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _uncompiled


def _import() -> None:
    events.append(("imported", list(sys.argv)))
    get_mindspeed_args()
    if hasattr(torch, "npu"):
        redirect()
    if os.environ.get("FAKE_MINDSPEED_RAISES"):
        raise RuntimeError("no such operator")
    torch.compile = _uncompiled
    transformer_engine.pretend()
    try:
        _patch()
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
    finally:
        transformer_engine.forget()


_import()
