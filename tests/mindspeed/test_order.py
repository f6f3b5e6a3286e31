"""Who imports MindSpeed and when, seen in fresh processes with the real Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.mindspeed import fresh, make_site

RECORD = """
ours = ("megatron", "mindspeed", "torch_npu", "engines_megatron", "engines_mindspeed")
order = []

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ours:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (order.append(name), execute(module))
        return spec

sys.meta_path.insert(0, Recorder())
"""
"""Notes every module of theirs in the order in which its code is run; merely looking for one runs none."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("order") / "site")


@pytest.mark.parametrize(
    "words", ["list", "why language_model megatron", "doctor", "show megatron", "schema engine:megatron"]
)
def test_commands_import_none_of_it(site: Path, words: str) -> None:
    code = f"""
    from engines.cli.main import main
    code = main({words.split()!r})
    answer([code, imported("mindspeed", "megatron", "torch_npu", "torch", "engines_mindspeed")])
    """
    assert fresh(site, code) == [0, []]


@pytest.fixture(scope="module")
def npu(site: Path) -> dict[str, Any]:
    """What a process says that has chosen the NPU."""
    code = (
        RECORD
        + """
import os
selection = choose()
before = list(order)
loaded = load(selection)
load(selection)
import mindspeed
from engines_megatron.runtime import cpu
from mindspeed.patch_utils import MindSpeedPatchesManager
from engines_mindspeed import arguments

said = {
    "before": before,
    "order": order[len(before):],
    "argv": sys.argv,
    "events": list(mindspeed.events),
    "class": loaded.engine_class.__name__,
    "fsdp2": refusal(load, choose(backend="fsdp2")),
    "cpu": refusal(cpu.install),
    "again": len(mindspeed.events),
}

def settings(**fields):
    return loaded.config_class(strategy="megatron", **fields).arguments()

mindspeed.events.clear()
arguments.acquire(settings())
arguments.acquire(settings())
said["repatch"] = list(mindspeed.events)
said["flash"] = sorted(MindSpeedPatchesManager.patches_info)
said["other"] = refusal(arguments.acquire, settings(flash_attention=False))
arguments.release()
said["still"] = refusal(arguments.acquire, settings(mindspeed={"use_fused_rotary_pos_emb": True}))
arguments.release()
said["unknown"] = refusal(arguments.acquire, settings(mindspeed={"use_fused_rotary_pos_embd": True}))
arguments.acquire(settings(mindspeed={"use_fused_rotary_pos_emb": True}))
arguments.release()
said["kept"] = refusal(arguments.acquire, settings())
arguments.acquire(settings(context_parallel_size=2, mindspeed={"use_fused_rotary_pos_emb": False}))
said["ring"] = sorted(MindSpeedPatchesManager.patches_info)
arguments.release()
os.environ["FAKE_MINDSPEED_FORGETS_FLASH"] = "1"
said["no effect"] = refusal(arguments.acquire, settings(mindspeed={"use_fused_rotary_pos_emb": False}))
answer(said)
"""
    )
    return fresh(site, code, "--optimization-level", "7", "lr=1")


def test_choosing_imports_nothing(npu: dict[str, Any]) -> None:
    assert npu["before"] == []


def test_the_adaptor_is_imported_before_megatron(npu: dict[str, Any]) -> None:
    order = npu["order"]
    assert order.index("mindspeed.megatron_adaptor") < order.index("megatron.core")
    assert order.index("torch_npu") < order.index("mindspeed.megatron_adaptor")
    assert order.index("megatron.core") < order.index("engines_mindspeed.engine")
    assert npu["class"] == "MindSpeedEngine"


def test_the_command_line_is_not_mindspeeds(npu: dict[str, Any]) -> None:
    assert npu["events"] == [["imported", ["-c"]]], "once, and without arguments, of which one would end the program"
    assert npu["argv"] == ["-c", "--optimization-level", "7", "lr=1"]


def test_nobody_beside_it(npu: dict[str, Any]) -> None:
    assert "fsdp2 on npu (engines-fsdp) cannot be loaded beside megatron on npu (engines-mindspeed)" in npu["fsdp2"]
    assert "must have its process to itself" in npu["fsdp2"]
    assert "this process has loaded it for npu" in npu["cpu"]
    assert npu["again"] == 1


def test_arguments_are_given_whole_and_once(npu: dict[str, Any]) -> None:
    whole = {
        "use_flash_attn": True,
        "attention_mask_type": "causal",
        "sparse_mode": 2,
        "context_parallel_size": 1,
        "context_parallel_algo": "megatron_cp_algo",
    }
    assert npu["repatch"] == [["repatch", whole]]


def test_arguments_decide_the_patches(npu: dict[str, Any]) -> None:
    attention = "megatron.core.transformer.dot_product_attention.DotProductAttention"
    assert f"{attention}.forward" in npu["flash"]
    assert attention in npu["ring"]
    assert f"{attention}.forward" not in npu["ring"]
    assert "megatron.core.parallel_state.initialize_model_parallel" in npu["ring"]


def test_other_arguments_beside_a_living_engine(npu: dict[str, Any]) -> None:
    assert npu["other"].startswith("ConfigError: a megatron engine with other arguments of MindSpeed lives")
    assert "sparse_mode is 2, asked for is 0, use_flash_attn is True, asked for is False" in npu["other"]
    assert "use_fused_rotary_pos_emb is not given, asked for is True" in npu["still"]


def test_an_argument_that_mindspeed_lacks(npu: dict[str, Any]) -> None:
    assert "ConfigError: engine.mindspeed.use_fused_rotary_pos_embd: MindSpeed has no such argument" in npu["unknown"]
    assert 'Did you mean "use_fused_rotary_pos_emb"?' in npu["unknown"]


def test_an_argument_that_mindspeed_would_keep(npu: dict[str, Any]) -> None:
    assert "an earlier engine of this process gave MindSpeed use_fused_rotary_pos_emb, which it keeps" in npu["kept"]


def test_an_argument_without_effect(npu: dict[str, Any]) -> None:
    assert "LaunchError: MindSpeed has not patched Megatron-Core for its arguments" in npu["no effect"]
    assert "DotProductAttention is Megatron's own, in spite of use_flash_attn" in npu["no effect"]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.more), "cuda"])
def test_other_devices_never_import_it(site: Path, device: str) -> None:
    code = f"""
    loaded = load(choose({device!r}))
    answer([loaded.engine_class.__name__, imported("mindspeed", "torch_npu", "engines_mindspeed")])
    """
    assert fresh(site, code, ENGINES_DEVICE=device) == ["MegatronEngine", []]
