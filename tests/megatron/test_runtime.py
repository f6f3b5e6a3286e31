"""Megatron-Core on a CPU in processes of its own: whoever is imported first, torch stays as it is for all others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import LaunchError
from engines.testing.plain import train
from engines.testing.samples import mini_batches
from engines_megatron.runtime import cpu, cuda, kinds

Deep = Callable[..., Path]


def python(code: str, *arguments: object) -> str:
    """What a fresh process that runs this prints; it sees the tests' folder."""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}"]
    command += map(str, arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS_NOTHING = """
import engines_megatron
assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "torch", "engines")]
import engines_megatron.config, engines_megatron.architectures, engines_megatron.layout
import engines_megatron.runtime.cuda
assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "torch", "transformers", "numpy")]
"""


def test_settings_are_read_without_torch_and_megatron() -> None:
    python(IMPORTS_NOTHING)


UNCHANGED = """
import torch
names = ("zeros", "ones", "empty", "tensor", "full", "arange", "cuda")
before = {name: getattr(torch, name) for name in names}
current, stream = torch.cuda.current_device, torch.cuda.Stream

def fails(call):
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return None

def answers():
    one = torch.zeros(2)
    return (
        [fails(lambda: torch.zeros(2, device="cuda")), fails(lambda: torch.arange(2, device="cuda"))],
        [fails(one.cuda), fails(torch.cuda.current_device), fails(lambda: torch.nn.Linear(2, 2).cuda())],
        [one.type(), one.type(torch.float64).dtype, one.bfloat16().type(), one.type("torch.LongTensor").type()],
        [torch.nn.Parameter(one).type(), torch.Tensor.type.__name__, torch.Tensor.cuda.__name__],
    )

plain = answers()
assert all(plain[0]) and all(plain[1]) and plain[2][0] == "torch.FloatTensor"

from engines_megatron.runtime.cpu import install
install()
install()
assert answers() == plain, "after install"
assert not any(name.startswith("megatron") for name in sys.modules)
import transformers
from transformers.models.qwen3 import modeling_qwen3
assert modeling_qwen3.torch is torch

import megatron.core.transformer.moe.moe_layer as moe_layer
import megatron.core.optimizer as optimizer
import engines_megatron.engine as engine
assert answers() == plain, "after Megatron's import"
assert all(getattr(torch, name) is value for name, value in before.items())
assert torch.cuda.current_device is current and torch.cuda.Stream is stream
assert engine.torch is torch, "the engine's own modules see torch itself"
assert moe_layer.torch is not torch
assert moe_layer.torch.zeros(2, device="cuda").device.type == "cpu"
assert moe_layer.torch.nn is torch.nn and moe_layer.torch.Tensor is torch.Tensor

caller = {"__name__": "megatron.core.anything", "one": torch.zeros(2)}
exec("kind, same = one.type(), one.cuda() is one", caller)
assert caller["kind"] == "torch.cuda.FloatTensor" and caller["same"]
"""


@pytest.mark.more
def test_torch_stays_as_it_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("this is about processes without CUDA")
    python(UNCHANGED)


STEP = """
import json
from types import FunctionType

def compiled():
    return [
        name
        for module_name, module in list(sys.modules.items()) if module_name.startswith("megatron.core")
        for name, value in list(vars(module).items())
        if isinstance(getattr(value, "_torchdynamo_orig_callable", None), FunctionType)
    ]

if sys.argv[2] == "early":
    import megatron.core.optimizer, megatron.core.pipeline_parallel, megatron.core.models.gpt.gpt_layer_specs
    from megatron.core.fusions import fused_bias_swiglu
    assert "swiglu" in compiled()
from engines.testing.runs import OPTIMIZER, pack
from support.megatron import settings
from engines.testing.samples import mini_batches
from engines.losses import SFTLoss
from engines.worker import TrainingWorker
with TrainingWorker({"path": sys.argv[1]}, settings("single"), OPTIMIZER) as worker:
    worker.initialize()
    steps = [worker.train_mini_batch(pack(samples), SFTLoss()) for samples in mini_batches()]
assert not compiled()
print(json.dumps([[step["loss"], step["grad_norm"]] for step in steps]))
"""


@pytest.mark.more
def test_megatron_imported_before_and_after(deep: Deep) -> None:
    """And without a launcher: a single process makes its own group."""
    folder = deep("qwen3_moe")
    early, late = (json.loads(python(STEP, folder, when)) for when in ("early", "late"))
    assert early == late
    expected = train(folder, mini_batches(), lr=1e-3, eps=1e-4)
    assert [loss for loss, _ in early] == pytest.approx(expected.losses, rel=5e-6)
    assert [norm for _, norm in early] == pytest.approx(expected.grad_norms, rel=5e-6)


def test_one_kind_of_device_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for first, second in ((cpu, cuda), (cuda, cpu)):
        claimed: list[Any] = []
        monkeypatch.setattr(kinds, "_claimed", claimed)
        kind, other = (module.__name__.rpartition(".")[2] for module in (first, second))
        kinds.claim(kind)
        with pytest.raises(LaunchError, match=f"megatron on {other} cannot be loaded.* loaded it for {kind}"):
            second.install()
        first.install()
        assert claimed == [kind]
