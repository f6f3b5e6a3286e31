"""`engines verify` as a user runs it: real processes, real engines, some of them wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engines.cli.main import main
from engines.registry import registry
from engines.testing.reference import REFERENCE
from engines.testing.tiny import tiny_folder
from engines.verifying.numbers import TOLERANCES
from support.faulty_engines import install_faulty_engines

RESULT = {"engine", "layout", "loss", "grad_norm", "weights", "exported", "tolerance", "seconds", "passed", "causes"}
NUMBERS = ("loss", "grad_norm", "weights", "exported")


def verify(*options: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    words = [sys.executable, "-m", "engines", "verify", *map(str, options)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ENGINES_")}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=280, check=False, env={**kept, "OMP_NUM_THREADS": "1", **env}
    )


def check_form(told: dict[str, Any]) -> None:
    """The form of `--json`, whatever it says."""
    assert set(told) == {"passed", "tolerances", "against", "steps", "results", "refused"}
    assert told["tolerances"] == asdict(TOLERANCES)
    assert told["passed"] == all(result["passed"] for result in told["results"])
    for result in told["results"]:
        assert set(result) == RESULT
        assert result["seconds"] > 0
        if result["passed"]:
            assert all(0 <= result[name] <= result["tolerance"][name] for name in NUMBERS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For PYTHONPATH: where the wrong engines are installed."""
    return str(install_faulty_engines(tmp_path_factory.mktemp("faulty") / "site"))


@pytest.mark.more
def test_an_engine_at_two_layouts(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = verify("--engine", "fsdp2", "--layouts", "single,dp2", "--steps", "2", "--json", "--html", page)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    check_form(told)
    assert [(one["engine"], one["layout"]) for one in told["results"]] == [("fsdp2", "single"), ("fsdp2", "dp2")]
    assert told["against"] == "reference" and told["steps"] == 2 and told["refused"] == []
    assert done.stderr.splitlines()[-1].startswith("2/2  fsdp2 at dp2: passed in")
    text = page.read_text()
    assert text.count("<svg") == 1 and "All 2 runs pass" in text and "fsdp2 at 2 layouts" in text
    assert not re.findall(r"<script|<link|<img|url\((?!#)|href=\"(?!#)", text), "nothing is fetched from elsewhere"


def test_wrong_engines_are_found_beside_the_right_one(site: str) -> None:
    """A gradient that is 1 % too large; a process that ends; one that raises; and one that wants none of it."""
    done = verify("--layouts", "single", "--steps", "1", PYTHONPATH=site, ENGINES_DENY="megatron")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "  single " in line}
    verdicts = {"fsdp2": "passed", "heavy": "FAILED", "dies": "FAILED", "trips": "FAILED"}
    assert {name: rows[name][-1] for name in verdicts} == verdicts
    assert [rows["heavy"][place] for place in (2, 3)] == ["0", "1.0e-02"], "the loss of the step is right"
    said = done.stdout.split("\n\n")[2].splitlines()
    assert said == [
        "failed   dies at single: rank 0 ended with exit code 9; its last words: out of memory on tile 7",
        "failed   trips at single: rank 0: KeyError: 'lr_scale'",
        "refused  refuses at single: this engine trains nothing below 7B. Take a larger model.",
    ]
    assert done.stdout.splitlines()[-1] == "3 of 4 runs failed: dies, heavy, trips."
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.more
def test_a_model_folder_of_ones_own(tmp_path: Path, site: str) -> None:
    """Its vocabulary and its longest sample are smaller than the tiny models', and megatron doesn't build it."""
    model = tiny_folder(tmp_path, "gpt2", vocab_size=50, n_positions=32)
    done = verify("--model", model, "--layouts", "single,tp2", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    check_form(told)
    assert [(one["engine"], one["layout"]) for one in told["results"]] == [("fsdp2", "single")]
    refused = {(one["engine"], one["layout"]): one["reason"] for one in told["refused"]}
    assert refused["fsdp2", "tp2"] == "needs tensor_parallel, which it doesn't declare"
    assert "gpt2" in refused["megatron", "single"] and "gpt2" in refused["megatron", "tp2"]


MEND = {
    "an engine that isn't there": (["--engine", "fdsp2"], 'has the backend "fdsp2". Did you mean "fsdp2"?'),
    "another that isn't there": (["--against", "mine"], 'No installed engine has the backend "mine".'),
    "an owner that isn't there": (["--engine", "fsdp2@engines-mine"], '"engines-mine" does not own it'),
    "a layout that isn't there": (["--layouts", "single,tp3"], 'There is no layout "tp3". Did you mean "tp2"?'),
    "no layout": (["--layouts", " , "], "no layout is named"),
    "a layout that isn't declared": (
        ["--engine", "fsdp2", "--layouts", "tp2"],
        "fsdp2 at tp2: needs tensor_parallel",
    ),
    "a device that nobody knows": (["--device", "cdua"], 'Did you mean "cuda"?'),
    "a model that isn't there": (["--model", "{tmp}/none"], "--model: there is no folder {tmp}/none"),
    "a folder without a model": (["--model", "{tmp}"], "holds no config.json"),
    "no step": (["--steps", "0"], "0 is not in the range"),
    "a page below nothing": (["--html", "{tmp}/none/page.html"], "there is no folder {tmp}/none"),
    "a page that is a folder": (["--html", "{tmp}"], "{tmp} is a folder"),
}


@pytest.mark.parametrize("case", MEND)
def test_what_must_be_mended_is_said_at_once(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, says = MEND[case]
    options = [word.format(tmp=tmp_path) for word in words]
    if case == "a layout that isn't declared":  # of the tiny models nobody asks, if there is a folder
        options += ["--model", str(tiny_folder(tmp_path, "llama"))]
    assert main(["verify", *options]) == 2
    assert says.format(tmp=tmp_path) in capsys.readouterr().err


def test_a_named_engine_that_refuses_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_folder(tmp_path, "gpt2")
    assert main(["verify", "--engine", "megatron", "--engine", "fsdp2", "--model", str(model)]) == 2
    said = capsys.readouterr().err
    assert "Error: megatron can't do what is asked for:\n  megatron at single, dp2, tp2," in said
    assert "gpt2" in said


def test_an_engine_that_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_folder(tmp_path, "llama")
    with registry.registered(**{**REFERENCE, "backend": "mute", "capabilities": ()}):
        assert main(["verify", "--engine", "mute", "--model", str(model)]) == 2
    assert "mute at single: needs export, which it doesn't declare" in capsys.readouterr().err


@pytest.mark.more
def test_every_installed_engine_at_every_layout() -> None:
    """The whole command, as it is published: under five minutes on two cores."""
    began = time.monotonic()
    done = verify("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 300
    told = json.loads(done.stdout)
    check_form(told)
    layouts = [(one["engine"], one["layout"]) for one in told["results"]]
    assert len([engine for engine, _ in layouts if engine == "fsdp2"]) >= 3
    assert {("megatron", "ep2"), ("megatron", "tp2 x cp2"), ("megatron", "dp2 distributed")} <= set(layouts)


@pytest.mark.more
def test_one_engine_against_another(tmp_path: Path, site: str) -> None:
    """Of which neither is the reference; a wrong baseline fails all that is compared with it."""
    model = tiny_folder(tmp_path, "qwen3_moe", num_hidden_layers=4)
    options = ("--model", model, "--layouts", "single,ep2", "--steps", "2")
    done = verify("--engine", "megatron", "--against", "fsdp2", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "All 2 runs pass: the same model is trained as by fsdp2."
    done = verify("--engine", "fsdp2", "--against", "trips", "--steps", "1", "--layouts", "single", PYTHONPATH=site)
    assert done.returncode == 1
    assert "trips, which the others are compared with, failed: rank 0: KeyError: 'lr_scale'" in done.stdout
    done = verify("--against", "refuses", "--layouts", "single", PYTHONPATH=site)
    assert done.returncode == 2
    assert "refuses, which the others are compared with, can't train tiny llama_tied" in done.stderr


@pytest.mark.more
def test_engines_on_another_device_than_the_reference(simulated_npu: Path) -> None:
    from simulated_npu.installing import PYTHONPATH

    few = {"PYTHONPATH": PYTHONPATH, "ENGINES_DEVICE": "npu", "ASCEND_RT_VISIBLE_DEVICES": "0"}
    done = verify("--engine", "fsdp2", "--layouts", "single,dp2", "--json", **few)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(one["layout"], one["passed"]) for one in told["results"]] == [("single", True)]
    assert told["refused"] == [
        {"engine": "fsdp2", "layout": "dp2", "reason": "needs 2 devices of npu, and 1 can be seen"}
    ]
