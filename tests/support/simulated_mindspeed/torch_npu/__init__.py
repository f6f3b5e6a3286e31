"""torch_npu for MindSpeed's own code on the simulated NPU: the device, and nothing in place of its kernels.

MindSpeed imports many names of torch_npu, torchair and triton. Here they exist, and raise when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.utils.flop_counter  # uses triton where it finds it, so before it is pretended

from simulated_npu.installing import install

PRETENDED = ("torch_npu", "torchair", "triton")


class Missing(ModuleType):
    """A module, class or function of a library that isn't there."""

    __version__ = "3.2.0"
    """triton's for Ascend, which Megatron-Core asks for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = Missing(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # a decorator
            return args[0]
        if self.__name__ == "triton.language.constexpr":  # which marks a value that Megatron-Core asks for
            return args[0]
        raise NotImplementedError(f"{self.__name__} does not exist on a simulated NPU")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Finder(MetaPathFinder, Loader):
    """Finds every module of theirs that no one else has."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] in PRETENDED:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


install()
sys.meta_path.append(_Finder())
npu = torch.npu


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"torch_npu.{name}")
