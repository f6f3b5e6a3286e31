"""Megatron-Core on a CPU: inside its modules `torch` means a view of torch whose CUDA calls answer for the CPU.

torch itself stays as it is for everybody else. The modules of `megatron.core` that are imported already are
adapted at once, later ones as they load. Measured with 0.16.1; `_FIXES` lists what the view can't reach.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

from engines_megatron.runtime import kinds
from engines_megatron.runtime.noise import silence

PACKAGE = "megatron.core"
FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
"""Functions of torch that Megatron-Core calls with device="cuda" or pinned memory."""


def install() -> None:
    """Adapt Megatron-Core in this process. Raises `LaunchError` where it serves CUDA already."""
    kinds.claim("cpu")
    silence(cpu=True)
    if not any(isinstance(finder, _Adapter) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Adapter())
        _answer_for_cpu_tensors()
    for name, module in list(sys.modules.items()):
        if _is_megatron(name):
            _adapt(module)


class _Adapter(MetaPathFinder):
    """Finds Megatron-Core's modules as the other finders do, and adapts each once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec


def _is_megatron(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def _adapt(module: ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _view()
    _undo_compilation(module)
    fix = _FIXES.get(module.__name__.removeprefix(PACKAGE + "."))
    if fix is not None:
        fix(module)


class _Stream:
    """The only stream of a device without streams."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@functools.cache
def _view() -> ModuleType:
    """torch as Megatron-Core's modules see it."""
    cuda = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": _Stream,
        "Stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "empty_cache": lambda: None,
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _overlay(torch, {**factories, "cuda": _overlay(torch.cuda, cuda)})


def _overlay(module: ModuleType, answers: dict[str, Any]) -> ModuleType:
    """A module that gives `answers` and has everything else from `module`."""
    view = ModuleType(module.__name__)
    view.__dict__.update(answers)
    view.__dict__["__getattr__"] = functools.partial(getattr, module)
    return view


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _answer_for_cpu_tensors() -> None:
    """Two methods of tensors that Megatron-Core relies on; they answer so to its modules alone.

    Its optimizers tell parameters by names like torch.cuda.FloatTensor, and some of its code calls `.cuda()`.
    """
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1) if not answer.startswith("torch.cuda.") else answer
        return answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else real_cuda(self, *args, **kwargs)

    torch.Tensor.type = functools.wraps(real_type)(tensor_type)  # type: ignore[method-assign]
    torch.Tensor.cuda = functools.wraps(real_cuda)(cuda)  # type: ignore[method-assign]


def _called_by_megatron() -> bool:
    return _is_megatron(sys._getframe(2).f_globals.get("__name__", ""))


def _without_compiler(jit: ModuleType) -> None:
    """torch.compile on a CPU starts a C++ compiler for each function."""
    jit.disable_jit_fuser()


def _undo_compilation(module: ModuleType) -> None:
    """The same for functions and methods that were wrapped before this process asked for the CPU."""
    own_classes = (value for value in vars(module).values() if isinstance(value, type))
    for place in (module, *(cls for cls in own_classes if cls.__module__ == module.__name__)):
        for name, value in list(vars(place).items()):
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if isinstance(plain, FunctionType):  # stand-ins for absent libraries have every attribute
                setattr(place, name, plain)


def _random_states(random: ModuleType) -> None:
    """They go past `torch.cuda` to CUDA's generators."""
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _splits_as_numbers(module: ModuleType) -> None:
    """It makes numpy arrays, which all-to-all takes as splits, of CUDA tensors only."""
    moved = module.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy() if as_numpy else tensor
        return moved(tensor, as_numpy=as_numpy, record_stream=record_stream)

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu  # type: ignore[attr-defined]


def _name_of_an_absent_library(moe_utils: ModuleType) -> None:
    """0.16.1 reads the name where TransformerEngine is absent, too, and binds it only where it isn't."""
    moe_utils.__dict__.setdefault("te_general_gemm", None)


_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "jit": _without_compiler,
    "tensor_parallel.random": _random_states,
    "transformer.moe.token_dispatcher": _splits_as_numbers,
    "transformer.moe.moe_utils": _name_of_an_absent_library,
}
