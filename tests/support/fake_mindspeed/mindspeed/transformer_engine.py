"""Fake modules `transformer_engine`: their presence while Megatron-Core is imported decides what it builds."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

from mindspeed.optimizer import SGD, AdamW

NAME = "transformer_engine"


def pretend() -> None:
    """Just enough for Megatron-Core to take it for there; what it doesn't find inside it does without."""
    layers = {name: _class(name) for name in ("Linear", "LayerNormLinear", "DotProductAttention", "GroupedLinear")}
    # attributes, but no modules: what is imported of these Megatron-Core does without
    distributed = SimpleNamespace(CudaRNGStatesTracker=_class("CudaRNGStatesTracker"))
    _make(NAME, common=SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=_class("DelayedScaling"))))
    _make(f"{NAME}.pytorch", distributed=distributed, **layers)
    _make(f"{NAME}.pytorch.optimizers", FusedAdam=AdamW, FusedSGD=SGD)
    _make(f"{NAME}.pytorch.float8_tensor", Float8Tensor=_class("Float8Tensor"))
    _make(f"{NAME}.pytorch.fp8", FP8GlobalStateManager=_class("FP8GlobalStateManager"), fp8_autocast=None)


def forget() -> None:
    """What Megatron has built of them stays; others, which look whether they are installed, no longer find them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def _class(name: str) -> type:
    return type(name, (torch.nn.Module,), {})


def _make(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes, __version__="0.8", __path__=[])
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
