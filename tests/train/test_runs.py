"""`engines train` from beginning to end: what it writes, and that no interruption changes it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.recipes.output.folder import OutputFolder
from support.commands import START_WITHIN_S, Command, gone, read_jsonl, read_lines, recipe, run, snapshot
from support.kills import STEPS_PER_KILL, Killer, exact, export, kill_seed

KILLS = 5
STEPS = 5 + KILLS * STEPS_PER_KILL
TRAINER: dict[str, Any] = {"steps": STEPS, "save_every": 3, "keep": 2}
assert STEPS % 3 == 0, "the last save is one of those"


@pytest.mark.timeout(900)
def test_a_run_and_every_interruption_of_it(work: Path) -> None:
    """One run straight through; another killed five times at random moments."""
    out = work / "out"
    file = recipe(
        work,
        trainer={**TRAINER, "eval_every": 5, "loggers": ["tensorboard"], "trace": True},
        data={"eval": str(work / "data.jsonl")},
        optimizer={"lr": 1e-3, "schedule": "linear", "warmup_steps": 3},
        launch={"nproc": 2, "timeout_s": 100},
    )
    code, output = run(file, "optimizer.weight_decay=0.1")
    assert code == 0, output
    check_output(output)
    check_metrics(read_jsonl(out / "metrics.jsonl"), read_jsonl(work / "data.jsonl"))
    check_files(out)

    before = snapshot(out)
    code, output = run(file, "optimizer.weight_decay=0.1")
    assert code == 0
    assert f"{out} holds a finished run of {STEPS} steps; nothing to do." in output
    assert snapshot(out) == before

    other = work / "interrupted"
    arguments = (file, "optimizer.weight_decay=0.1", f"trainer.output_dir={other}", "trainer.loggers=[]")
    arguments = (*arguments, "trainer.trace=false")
    killer = Killer(arguments, other, kill_seed())
    for _ in range(KILLS):
        killer.kill()
    code, output = run(*arguments)
    assert code == 0, output
    assert f"going on from {other}/checkpoints/step-" in output
    killer.check_end(out)


def check_output(output: str) -> None:
    assert "language_model fsdp2: engines-fsdp" in output, "the engine chosen and why"
    assert "2 processes on" in output
    assert f"step {STEPS}/{STEPS}  loss " in output
    assert output.count("Error") == 0


def check_metrics(lines: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    warm = [1e-3 * k / 3 for k in (1, 2, 3)]
    decay = [1e-3 * (STEPS - k) / (STEPS - 3) for k in range(4, STEPS + 1)]
    assert [line["lr"] for line in lines] == pytest.approx(warm + decay, rel=1e-12)
    assert all(0 < line["loss"] < 10 and line["grad_norm"] > 0 for line in lines)
    # 13 steps of 3 are 3 epochs of 13 samples, in whatever order
    tokens = sum(len(record["input_ids"]) for record in records)
    targets = sum(sum(record["loss_mask"][1:]) for record in records)
    assert sum(line["tokens"] for line in lines[:13]) == 3 * tokens
    assert sum(line["targets"] for line in lines[:13]) == 3 * targets
    evaluated = [line["step"] for line in lines if line.get("eval_loss") is not None]
    assert evaluated == [*range(5, STEPS, 5), STEPS]
    assert {line["eval_targets"] for line in lines if "eval_targets" in line} == {targets}
    assert lines[-1]["eval_loss"] < lines[4]["eval_loss"], "it learns"
    assert not any(line["skipped_step"] for line in lines)


def check_files(out: Path) -> None:
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"step-{STEPS - 3}", f"step-{STEPS}"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events") for path in (out / "tensorboard").iterdir())
    assert {path.name for path in (out / "trace").iterdir()} == {"rank-0.json", "rank-1.json"}
    info = json.loads((out / "run.json").read_text())
    assert (info["strategy"], info["device"], info["world_size"]) == ("fsdp2", "cpu", 2)
    assert info["layout"]["data_parallel_size"] == 2
    assert info["layout"]["tensor_parallel_size"] == 1
    assert {"engines-core", "engines-fsdp", "torch"} <= set(info["distributions"])
    assert info["finished"] is True
    from safetensors import safe_open

    with safe_open(out / "export" / "model.safetensors", framework="numpy") as weights:
        size = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert sum(info["parameters_per_rank"]) == size
    resolved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert resolved["optimizer"]["weight_decay"] == 0.1, "an override"
    assert resolved["optimizer"]["betas"] == [0.9, 0.999], "a default"


@pytest.mark.more
def test_ctrl_c(work: Path) -> None:
    """The run finishes its step, saves, and says so; without `save_on_exit`: test_fields.py."""
    out = work / "out"
    file = recipe(work, trainer=TRAINER, launch={"nproc": 2})
    command = Command(file)
    command.when(lambda: len(read_lines(out / "metrics.jsonl")) >= 4)
    ranks = command.ranks()
    command.process.send_signal(signal.SIGINT)
    code, output = command.finish()
    assert code == 130, output
    steps = len(read_jsonl(out / "metrics.jsonl"))
    assert OutputFolder(out).steps()[-1] == steps
    assert output.count("SIGINT: the run stops after this step; a second one ends it at once\n") == 1
    onward = f"step {steps} is the last one saved, and the same command goes on from there"
    assert f"stopped after step {steps}; {onward}" in output
    assert not (out / "export").exists()
    assert gone(ranks, within_s=0)


@pytest.mark.more
def test_the_same_on_two_machines_under_torchrun(work: Path) -> None:
    """Two agents that meet on the loopback: equal numbers, and nobody outlives an agent that is killed."""
    ours, theirs = work / "ours", work / "theirs"
    file = recipe(work, trainer=TRAINER, launch={"nproc": 2})
    assert run(file, f"trainer.output_dir={ours}")[0] == 0
    agents = start_agents(file, f"trainer.output_dir={theirs}")
    agents[0].when(lambda: len(read_lines(theirs / "metrics.jsonl")) >= 4)
    workers = [agent.ranks() for agent in agents]
    assert [len(each) for each in workers] == [1, 1]
    agents[1].process.kill()
    assert gone(workers[1]), "though the agent gave it a session of its own"
    assert agents[0].finish()[0] != 0
    assert gone(workers[0])
    agents[1].process.communicate()

    outputs = [agent.finish() for agent in start_agents(file, f"trainer.output_dir={theirs}")]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "".join(output for _, output in outputs).count(f"going on from {theirs}/checkpoints/step-") == 1
    assert exact(theirs) == exact(ours)
    assert export(theirs) == export(ours)

    # the machine of rank 0, which alone refuses, isn't the one that keeps the agents' rendezvous
    refused = start_agents(file, f"trainer.output_dir={theirs}", "trainer.resume=never", host=1)
    outputs = [agent.finish(START_WITHIN_S) for agent in refused]
    assert all(code != 0 for code, _ in outputs)
    assert "".join(output for _, output in outputs).count("Error: trainer.resume is never, but") == 1


@pytest.mark.more
def test_a_plain_launchers_ranks_that_differ(work: Path) -> None:
    """It sets the variables where ranks meet, and no more: one has another recipe, and none begins."""
    file, place = recipe(work), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [Command(file, f"optimizer.lr=0.{rank + 1}", env={**place, "RANK": str(rank)}) for rank in range(2)]
    for code, output in [rank.finish(START_WITHIN_S) for rank in ranks]:
        assert code == 2
        assert "Error: no rank starts: rank 1: what is to run on" in output
        assert "\n  optimizer.lr: 0.2, not 0.1\n" in output
    assert not (work / "out").exists()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_agents(*arguments: str | Path, host: int = 0) -> list[Command]:
    """torchrun on two "machines", one process each; `host` keeps their rendezvous. They decide who has rank 0."""
    place = f"127.0.0.1:{free_port()}"
    rendezvous = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=run")
    return [
        Command(
            *arguments,
            launcher=(
                *(sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--rdzv-conf=is_host={agent == host}"),
                *("--nproc-per-node=1", "-m", "engines"),
            ),
        )
        for agent in range(2)
    ]


@pytest.mark.more
def test_a_rank_that_is_stopped_ends_the_run(work: Path) -> None:
    """Others wait for it in a collective; the rank that is stopped is the one named."""
    out = work / "out"
    command = Command(recipe(work, trainer={"steps": 10_000}, launch={"nproc": 2, "timeout_s": 15}))
    command.when(lambda: len(read_lines(out / "metrics.jsonl")) >= 2)
    ranks = command.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    code, output = command.finish(timeout_s=60)
    assert code == 1
    assert "Error: rank 1 has shown no sign of life for" in output
    assert "somebody stopped its process (SIGSTOP)" in output
    assert gone(ranks, within_s=0)
