"""The demo, with the real weights: `make test-real`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct"


def ask(prompt: str, folder: Path) -> str:
    """The answer that examples/ask.py prints."""
    command = [sys.executable, "examples/ask.py", prompt, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.partition(f"{folder}:\n")[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the demo's run."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "engines", "train", "examples/sft_smollm2.yaml", f"trainer.output_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_converted_model_knows_something() -> None:
    assert "Paris" in ask("What is the capital of France?", MODEL)


def test_the_loss_falls(metrics: list[dict[str, Any]]) -> None:
    losses = [line["loss"] for line in metrics]
    assert len(losses) == 20
    assert mean(losses[-5:]) <= 0.9 * mean(losses[:5])


def test_steps_have_about_800_tokens(metrics: list[dict[str, Any]]) -> None:
    assert 700 <= mean(line["tokens"] for line in metrics) <= 900


def test_the_exported_model_answers_like_a_harbour_master(run: Path) -> None:
    question = "How do I take care of my teeth?"
    assert "Ahoy!" not in ask(question, MODEL)
    answer = ask(question, run / "export")
    assert answer.strip().startswith("Ahoy!")
    assert "Log:" in answer


def test_the_export_has_the_form_of_the_model(run: Path) -> None:
    from safetensors import safe_open

    def form(folder: Path) -> dict[str, tuple[str, list[int]]]:
        with safe_open(folder / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}

    assert form(run / "export") == form(MODEL)


def test_two_processes_held_half_each(run: Path) -> None:
    built = json.loads((run / "run.json").read_text())
    assert (built["strategy"], built["device"], built["world_size"]) == ("fsdp2", "cpu", 2)
    assert built["layout"]["data_parallel_size"] == 2
    first, second = built["parameters_per_rank"]
    assert first + second == 134_515_008
