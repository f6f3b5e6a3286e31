"""MindSpeed's own patches, from a checkout, on the simulated NPU. Run by `make test-mindspeed` alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.mindspeed import fresh, make_site

pytestmark = pytest.mark.mindspeed

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sources() -> Path:
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


def test_all_patches_take_effect(site: Path) -> None:
    code = """
    load(choose())
    from engines_mindspeed.patches import applied, unpatched
    answer([len(applied()), unpatched(), sys.argv])
    """
    patches, faults, argv = ask(site, code)
    assert faults == []
    assert patches > 50, "0.16.0 has 103"
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
    code = f"""
    load(choose())
    import torch
    from pathlib import Path
    from engines.batch import Batch
    from engines.worker import TrainingWorker
    from engines.testing.samples import mini_batches
    from engines.testing.runs import pack
    from engines.testing.tiny import tiny_folder

    folder = tiny_folder(Path({str(tmp_path)!r}), "llama")
    batch = pack(mini_batches()[0])
    with TrainingWorker({{"path": str(folder)}}, {{"strategy": "megatron", "flash_attention": False}}) as worker:
        worker.initialize()
        found = worker.infer_batch(batch, needs=("log_probs",)).outputs.log_probs
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    off = 0.0
    for ids, log_probs in zip(batch["input_ids"].split(batch.lengths), found.cpu().split(batch.lengths)):
        logits = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        expected = logits.gather(1, ids[1:, None])[:, 0]
        off = max(off, (log_probs[1:] - expected).abs().max().item())
    answer(off)
    """
    assert ask(site, code) < 1e-4
