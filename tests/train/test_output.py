"""metrics.jsonl and the output folder: cut back, torn, locked, and where a run begins."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from engines.errors import CheckpointError, ConfigError
from engines.recipes.output.chart import draw_loss
from engines.recipes.output.folder import OutputFolder
from engines.recipes.output.metrics import MetricsFile, read_metrics
from engines.recipes.output.progress import Lines
from engines.recipes.output.starting import Start
from support.checkpoints import save_whole
from support.commands import snapshot

LINE = {"loss": 0.1 + 0.2, "grad_norm": 1.0, "lr": 1e-5, "tokens_per_second": 1234.5}


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_metrics_are_exact_and_visible_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, steps_done=0)
    metrics.append({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan, "lr": math.inf})
    assert path.read_text() == '{"step": 1, "loss": 0.30000000000000004, "grad_norm": null, "lr": null}\n'
    metrics.close()


@pytest.mark.parametrize("tail", ["", '{"step": 5, "lo', '{"step": 5}', "\x00\x00\x00", '{"step": 5}\n{"st'])
@pytest.mark.parametrize("done", [0, 2, 4])
def test_a_resumed_run_goes_on_behind_its_checkpoint(done: int, tail: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {k}}}\n' for k in (1, 2, 3, 4)) + tail)
    metrics = MetricsFile(path, steps_done=done)
    assert steps(path) == list(range(1, done + 1))
    metrics.append({"step": done + 1})
    metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, done + 2))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ('{"step": 1}\n{"step": 2}\n{"st', True),
        ('{"step": 2}\n{"step": 3}\ngarbage\n', True),
        ('{"step": 3}\n', True),
        ('{"st', True),
        ('{"step": 1}\n{"st', False),
        ('{"step": 1}\ngarbage\n{"step": 3}\n', False),
        ('{"step": 1}\n{"step": 3}\n', False),
        ("garbage\n", False),
        ('{"step": "1"}\n', False),
    ],
)
def test_lines_before_the_checkpoint_are_not_cut_off(text: str, fits: bool, tmp_path: Path) -> None:
    """What is behind step 2 is done again; what is before it is history, which may have been moved away."""
    folder = OutputFolder(tmp_path)
    checkpoints(folder, 2)
    folder.metrics.write_text(text)
    if fits:
        assert folder.start("auto", 9).step == 2
    else:
        with pytest.raises(ConfigError, match="but the run would go on from step 2: its lines would be lost"):
            folder.start("auto", 9)
    assert folder.metrics.read_text() == text


def test_metrics_that_others_change_end_the_run(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", steps_done=0)
    metrics.append({"step": 1})
    metrics.sync()
    os.truncate(tmp_path / "metrics.jsonl", 3)
    with pytest.raises(OSError, match="it has 3 bytes instead of 12: others write it"):
        metrics.sync()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="it was taken away"):
        metrics.append({"step": 2})


def test_metrics_are_set_aside_by_names_that_are_free(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    for text in ("first", "second"):
        folder.metrics.write_text(text)
        folder.set_metrics_aside()
    assert [(tmp_path / f"metrics-before-{number}.jsonl").read_text() for number in (1, 2)] == ["first", "second"]


def checkpoints(folder: OutputFolder, *done: int) -> None:
    for step in done:
        save_whole(folder.checkpoint(step), step=step)


def test_where_a_run_begins(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    fresh = Start(None, 0, finished=False)
    assert folder.start("auto", 10) == fresh == folder.start("never", 10)
    checkpoints(folder, 2, 10, 4)
    (folder.checkpoints / ".step-12.tmp").mkdir()
    (folder.checkpoints / "step-016").mkdir()
    assert folder.steps() == [2, 4, 10]
    assert folder.start("auto", 20) == Start(folder.checkpoint(10), 10, finished=False)
    assert folder.start(str(folder.checkpoint(10)), 20) == Start(folder.checkpoint(10), 10, finished=False)
    other = OutputFolder(tmp_path / "other")
    assert other.start(str(folder.checkpoint(4)), 20) == Start(folder.checkpoint(4), 4, finished=False)
    with pytest.raises(ConfigError, match="already holds step-10"):
        folder.start(str(folder.checkpoint(4)), 20)
    with pytest.raises(CheckpointError, match=r"manifest\.json is a file, not the folder of a checkpoint"):
        other.start(str(folder.checkpoint(4) / "manifest.json"), 20)
    for inside in (folder.path, folder.checkpoints):
        with pytest.raises(CheckpointError, match=f"The latest complete one is {folder.checkpoint(10)}."):
            other.start(str(inside), 20)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-5"):
        other.start(str(folder.checkpoint(5)), 20)
    with pytest.raises(ConfigError, match="already holds step-3"):
        checkpoints(other, 3)
        other.start(str(folder.checkpoint(4)), 20)
    checkpoints(folder, 12, 14)
    (folder.checkpoint(12) / "manifest.json").unlink()  # will get another name
    os.truncate(folder.checkpoint(14) / "state.json", 1)
    with pytest.raises(CheckpointError, match=r"Restore step-14 .*the same command then goes on from step-10"):
        folder.start("auto", 20)
    shutil.rmtree(folder.checkpoint(14))
    assert folder.start("auto", 20) == Start(folder.checkpoint(10), 10, finished=False)
    os.truncate(other.checkpoint(3) / "index.json", 0)
    with pytest.raises(CheckpointError, match=r"trainer.resume: .*index.json has 0 bytes"):
        other.start(str(other.checkpoint(3)), 20)


def test_a_finished_run_is_finished_for_as_many_steps(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    checkpoints(folder, 10)
    assert not folder.start("auto", 10).finished, "the export may be missing"
    folder.write_run({"steps": 10, "finished": True})
    assert folder.start("auto", 10).finished
    assert folder.start("auto", 8).finished
    assert folder.start("auto", 12) == Start(folder.checkpoint(10), 10, finished=False)
    folder.write_run({"steps": 12, "finished": False})
    assert not folder.start("auto", 10).finished


def test_a_finished_run_is_finished_as_far_as_its_checkpoints_say(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    checkpoints(folder, 8, 10)
    folder.write_run({"steps": 10, "finished": True})
    shutil.rmtree(folder.checkpoint(10))
    assert folder.start("auto", 10) == Start(folder.checkpoint(8), 8, finished=False)
    folder.run.write_bytes(b"")
    assert folder.start("auto", 10) == Start(folder.checkpoint(8), 8, finished=False)
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(ConfigError, match=r"run\.json is damaged: a finished run may lie here"):
        folder.start("auto", 10)
    folder.write_run({"steps": 10, "finished": True})
    for steps in (8, 10, 12):
        with pytest.raises(ConfigError, match="a finished run of 10 steps, but none of its checkpoints") as caught:
            folder.start("auto", steps)
    assert "export" not in str(caught.value)
    (folder.export).mkdir()
    (folder.export / "config.json").touch()
    with pytest.raises(ConfigError, match=f"Its export is {folder.export}, from which model.path can start"):
        folder.start("auto", 10)


def test_a_finished_run_tells_what_was_not_done(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.recipe.write_text("trainer:\n  steps: 10\n  export: false\noptimizer:\n  lr: 0.1\n")
    same = {"trainer": {"steps": 10, "export": False}, "optimizer": {"lr": 0.1}}
    assert folder.say_finished(10, same) == f"{tmp_path} holds a finished run of 10 steps; nothing to do."
    assert folder.say_onward(folder.checkpoint(10), same) == f"going on from {folder.checkpoint(10)}"
    other = {"trainer": {"steps": 20, "export": False}, "optimizer": {"lr": 0.1}}
    assert folder.say_onward(folder.checkpoint(10), other).splitlines()[1:] == [
        "The recipe was another before; from here on it is:",
        "  trainer.steps: 10 then, 20 now",
    ]
    said = folder.say_finished(10, {"trainer": {"steps": 8, "export": False}, "optimizer": {"lr": 0.2}})
    assert said.splitlines()[1:] == [
        "Its recipe was another, and what is asked for now was not done:",
        "  trainer.steps: 10 then, 8 now",
        "  optimizer.lr: 0.1 then, 0.2 now",
    ]
    data = tmp_path / "data.jsonl"
    for file, time in ((folder.run, 2e9), (data, 1e9)):
        file.touch()
        os.utime(file, (time, time))
    folder.recipe.write_text(f"data:\n  train: {data}\ntrainer:\n  export: false\n")
    trained = {"data": {"train": str(data)}, "trainer": {"export": False}}
    assert len(folder.say_finished(10, trained).splitlines()) == 1
    os.utime(data, (3e9, 3e9))
    said = folder.say_finished(10, trained)
    assert said.splitlines()[1:] == [
        "Written after it, and so perhaps not what was learned:",
        f"  data.train: {data}",
    ]


def test_a_finished_run_whose_export_is_not_there_names_the_command(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "a run")
    checkpoints(folder, 2, 4)
    asked = {"trainer": {"export": True}, "model": {"dtype": "bfloat16"}}
    said, command = folder.say_finished(4, asked).splitlines()
    assert said == f"{folder.path} holds a finished run of 4 steps; {folder.export} isn't there. This writes it:"
    written = f"'{folder.checkpoint(4)}' '{folder.export}'"
    assert command.strip() == f"engines checkpoint convert {written} --dtype bfloat16"
    folder.export.mkdir()
    (folder.export / "config.json").touch()
    assert folder.say_finished(4, asked).endswith("; nothing to do.")


def test_a_recipe_that_no_run_wrote_is_not_written_over(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.write_recipe({"trainer": {"steps": 2}})  # and killed before run.json was written
    folder.check_writable()
    folder.recipe.write_text("# mine\ntrainer:\n  steps: 2\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml was not written by a run, and the run would write over it"):
        folder.check_writable()
    folder.write_run({})  # a run from before the first line said so
    folder.check_writable()


@pytest.mark.parametrize("held", [b"trainer: [1", b"- 1", b"\xff\xfe\x00"])
def test_a_damaged_recipe_of_before_stops_nothing(held: bytes, tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.recipe.write_bytes(held)
    assert f"{folder.recipe} is damaged" in folder.say_onward(folder.checkpoint(10), {})
    folder.recipe.unlink()
    folder.recipe.symlink_to("/proc/self/mem")  # a file that can't be read
    assert f"{folder.recipe} can't be read: Input/output error" in folder.say_onward(folder.checkpoint(10), {})


def test_folders_that_may_not_be_written_are_refused_before_a_run(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.checkpoints.symlink_to("/proc/self")  # where not even root may write
    with pytest.raises(ConfigError, match="checkpoints may not be read and written"):
        folder.check_writable()


def test_a_lock_leaves_nothing_behind_where_nothing_was_written(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "a" / "b")
    with pytest.raises(ZeroDivisionError), folder.locked():
        for _ in range(2):
            with pytest.raises(ConfigError, match="in use by another run"), folder.locked():
                pass
            (folder.path / ".lock").unlink(missing_ok=True)  # by somebody who takes it for a leftover
        raise ZeroDivisionError
    assert snapshot(tmp_path) == {}
    with pytest.raises(ZeroDivisionError), folder.locked():
        folder.write_run({})
        raise ZeroDivisionError
    assert folder.run.exists()
    with folder.locked():
        pass


def test_lines_for_who_has_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Lines(3, 0)
    for step in (1, 2, 3):
        progress.step(step, {**LINE, "skip_reason": "empty" if step == 3 else None, "eval_loss": 0.5})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/3  loss 0.3000  eval loss 0.5000  lr 1e-05  grad norm 1  1,234 tokens/s  0:0")
    assert last.endswith("tokens/s  skipped (empty)  0:00 left")


def test_the_chart_needs_no_display_and_no_loss(tmp_path: Path) -> None:
    lines = [
        {"step": k, "loss": None if k == 3 else 1 / k, "eval_loss": 1 / k if k == 4 else None} for k in range(1, 9)
    ]
    draw_loss(lines, tmp_path / "loss.png", title="run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    draw_loss([{"step": 1, "loss": None}], tmp_path / "none.png", title="run")
    assert not (tmp_path / "none.png").exists()
