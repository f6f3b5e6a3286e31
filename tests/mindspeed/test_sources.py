"""MindSpeed's own patches, from a checkout, on the simulated NPU. Run by `make test-mindspeed` alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.testing.runs import pack
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder
from support.mindspeed import FAKE, fresh, make_site

TESTS = Path(__file__).parents[1]
LEAST_PATCHES = {"stand-in": 1, "checkout": 50}
"""MindSpeed 0.16.0 has 103."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("stand-in", marks=pytest.mark.more),  # so that the suite itself is known to run
        pytest.param("checkout", marks=pytest.mark.mindspeed),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sources(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if kind == "stand-in":
        checkout = tmp_path_factory.mktemp("checkout")
        (checkout / "setup.py").write_text('setup(name="mindspeed", version="0.16.0")')
        (checkout / "mindspeed").symlink_to(FAKE / "mindspeed")
        return checkout
    named = os.environ.get("MINDSPEED_SRC")
    if not named:
        pytest.skip("MINDSPEED_SRC names no checkout of MindSpeed")
    return Path(named)


@pytest.fixture(scope="module")
def site(sources: Path, simulated_npu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MindSpeed from the checkout, with the version that its setup.py states, and a torch_npu without kernels."""
    version = re.search(r"version\s*=\s*[\"']([\d.]+)", (sources / "setup.py").read_text())
    assert version, f"{sources}/setup.py states no version"
    made = make_site(tmp_path_factory.mktemp("sources") / "site", mindspeed=version[1], torch_npu=None)
    (made / "mindspeed").unlink()
    (made / "mindspeed").symlink_to(sources / "mindspeed")
    (made / "torch_npu").symlink_to(TESTS / "support/simulated_mindspeed/torch_npu")
    return made


def ask(site: Path, code: str) -> object:
    return fresh(site, code, "--optimization-level", "7", PYTHONPATH=f"{site}{os.pathsep}{TESTS}")


def test_all_patches_take_effect(site: Path, kind: str) -> None:
    code = """
    load(choose())
    from engines_mindspeed.patches import applied, unpatched
    answer([len(applied()), unpatched(), sys.argv])
    """
    patches, faults, argv = ask(site, code)
    assert faults == []
    assert patches >= LEAST_PATCHES[kind]
    assert argv == ["-c", "--optimization-level", "7"]


def test_arguments_decide_the_patches(site: Path) -> None:
    code = """
    config = load(choose()).config_class
    from engines_mindspeed import arguments
    from engines_mindspeed.patches import applied, attention_is_mindspeeds
    said = []
    for settings in ({"flash_attention": False}, {}, {"context_parallel_size": 2}):
        arguments.acquire(config(strategy="megatron", **settings).arguments())
        groups = "megatron.core.parallel_state.initialize_model_parallel" in applied()
        said.append([attention_is_mindspeeds(), groups])
        arguments.release()
    answer(said)
    """
    assert ask(site, code) == [[False, False], [True, False], [True, True]]


def test_a_model_computes_the_same(site: Path, tmp_path: Path) -> None:
    """Log-probabilities on the patched Megatron-Core, with torch's attention; its fused AdamW has no kernel here."""
    folder = tiny_folder(tmp_path, "llama")
    code = f"""
    load(choose())
    from engines.worker import TrainingWorker
    from engines.testing.runs import pack
    from engines.testing.samples import mini_batches

    with TrainingWorker({{"path": {str(folder)!r}}}, {{"strategy": "megatron", "flash_attention": False}}) as worker:
        worker.initialize()
        outputs = worker.infer_batch(pack(mini_batches()[0]), needs=("log_probs",)).outputs
        answer([str(worker.device), outputs.log_probs.tolist()])
    """
    device, found = ask(site, code)
    assert device == "npu:0"
    batch = pack(mini_batches()[0])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, log_probs in zip(
        batch["input_ids"].split(batch.lengths), torch.tensor(found).split(batch.lengths), strict=True
    ):
        logits = model(input_ids=ids[None]).logits[0, :-1].detach()
        expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(log_probs[1:], expected, atol=1e-4, rtol=0)
