"""A run's output folder: what lies where, who may write, and where a run begins. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from engines.checkpoint_folder import enclosing
from engines.checkpoint_folder.store import CheckpointStore, checkpoint_number
from engines.errors import CheckpointError, ConfigError
from engines.recipes.output.changes import changed_data, changed_settings
from engines.recipes.output.metrics import holds_lines, read_metrics
from engines.recipes.output.occupied import (
    ELSEWHERE,
    WRITTEN,
    check_export,
    check_no_model,
    check_recipe,
    convert_command,
)
from engines.recipes.output.starting import Start, checkpoint_step


@dataclass(frozen=True)
class OutputFolder:
    """The folder `trainer.output_dir`, which need not exist yet."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def run(self) -> Path:
        """What was built, and whether the run is finished."""
        return self.path / "run.json"

    @property
    def recipe(self) -> Path:
        """The resolved recipe: files, overrides and defaults in one."""
        return self.path / "recipe.yaml"

    @property
    def chart(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def trace(self) -> Path:
        """Chrome traces, one a rank."""
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        """Folder of step-N."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.checkpoints / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [step for step in CheckpointStore(self.checkpoints).steps() if step]

    def holds_run(self) -> bool:
        """Whether a run has written here."""
        return self.metrics.exists() or self.run.exists() or bool(self.steps())

    def say_finished(self, step: int, recipe: Mapping[str, Any]) -> str:
        """What to say about a run that has nothing left to train; `recipe`: what was asked for now, resolved."""
        lines = [f"{self.path} holds a finished run of {step} steps; {self._say_left(recipe)}"]
        changed = changed_settings(self.recipe, recipe)
        if changed:
            lines += ["Its recipe was another, and what is asked for now was not done:", *changed]
        if younger := changed_data(self.run, recipe):
            lines += ["Written after it, and so perhaps not what was learned:", *younger]
        return "\n".join(lines)

    def _say_left(self, recipe: Mapping[str, Any]) -> str:
        """The export may have been deleted since, or not have been asked for then."""
        steps = self.steps()
        if not steps or not recipe["trainer"]["export"] or (self.export / "config.json").exists():
            return "nothing to do."
        command = convert_command(self.checkpoint(steps[-1]), self.export, recipe["model"]["dtype"])
        return f"{self.export} isn't there. This writes it:\n  {command}"

    def say_onward(self, checkpoint: Path, recipe: Mapping[str, Any]) -> str:
        """What to say about a run that goes on from `checkpoint`; `recipe`: what is asked for now, resolved."""
        lines = [f"going on from {checkpoint}"]
        mine = checkpoint.parent.resolve() == self.checkpoints.resolve()
        changed = changed_settings(self.recipe, recipe) if mine else []
        if changed:
            lines += ["The recipe was another before; from here on it is:", *changed]
        return "\n".join(lines)

    def set_metrics_aside(self) -> Path:
        """Give metrics.jsonl, which a run that starts afresh would empty, a name of its own."""
        names = (self.path / f"metrics-before-{number}.jsonl" for number in count(1))
        aside = next(path for path in names if not path.exists())
        return self.metrics.rename(aside)

    def finished_step(self) -> int | None:
        """Steps of the finished run that lies here, if one does. Raises `ConfigError` where run.json is damaged."""
        try:
            info = json.loads(self.run.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            info = None
        if not isinstance(info, dict):
            if not self.steps():
                raise ConfigError(
                    f"{self.run} is damaged: a finished run may lie here, and no checkpoint says", ELSEWHERE
                )
            return None
        if info.get("finished") is not True:
            return None
        if type(info.get("steps")) is not int or info["steps"] < 1:
            raise ConfigError(f"{self.run} is damaged: it names no number of steps", ELSEWHERE)
        return int(info["steps"])

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Write run.json, whole or not at all."""
        self._write(self.run, json.dumps(info, indent=2) + "\n")

    def write_recipe(self, resolved: Mapping[str, Any]) -> None:
        """Write recipe.yaml, whole or not at all."""
        from omegaconf import OmegaConf

        self._write(self.recipe, WRITTEN + OmegaConf.to_yaml(OmegaConf.create(dict(resolved))))

    def _write(self, file: Path, text: str) -> None:
        part = file.with_name(f".{file.name}")
        try:
            with part.open("w") as opened:
                opened.write(text)
                opened.flush()
                os.fsync(opened.fileno())
            part.replace(file)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def check_writable(self) -> None:
        """Raise `ConfigError` if it isn't a folder, or can't become one, in which files can be made."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"trainer.output_dir: {self.path} is a file, not a folder")
        if self.path.is_symlink() and not self.path.exists():
            raise ConfigError(f"trainer.output_dir: {self.path} is a link that leads nowhere")
        if around := enclosing(self.path):
            raise ConfigError(f"trainer.output_dir: {self.path} is, or lies in, {around}, where checkpoints alone do")
        existing = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"trainer.output_dir: {self.path} can't be written, since {existing} can't")
        for file in (self.metrics, self.run, self.recipe, self.chart):
            if file.is_dir():
                raise ConfigError(f"{file} is a folder, where the run would write a file", ELSEWHERE)
        for folder in (self.checkpoints, self.trace):
            if folder.is_symlink() and not folder.exists():
                raise ConfigError(f"{folder} is a link that leads nowhere", "Is what it leads to not mounted?")
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder} is a file, where the run would make a folder", ELSEWHERE)
            if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(f"trainer.output_dir: {folder} may not be read and written")
        holds_run = self.holds_run()
        check_no_model(self.path, holds_run=holds_run)
        check_recipe(self.recipe, holds_run=holds_run)

    def check_export(self, model: Path) -> None:
        """Raise `ConfigError` if the export at the end would have to delete what isn't one, or the `model` itself."""
        check_export(self.export, model)

    def start(self, resume: str, total_steps: int) -> Start:
        """Where a run of `total_steps` begins, by `trainer.resume` and by what is complete on disk.

        Raises `ConfigError`, and `CheckpointError` where it would begin before a damaged checkpoint.
        """
        match resume:
            case "never":
                if self.holds_run():
                    raise ConfigError(
                        f"trainer.resume is never, but {self.path} holds a run",
                        "Choose another trainer.output_dir, or go on with trainer.resume=auto.",
                    )
                return Start(None, 0, finished=False)
            case "auto":
                self._refuse_damage()
                step = max(self.steps(), default=0)
                return self._start(self.checkpoint(step) if step else None, step, total_steps)
            case path:
                checkpoint = Path(path).expanduser()
                step = checkpoint_step(checkpoint)
                self._check_nothing_later(checkpoint, step)
                return self._start(checkpoint, step, total_steps)

    def _start(self, checkpoint: Path | None, step: int, total_steps: int) -> Start:
        finished = self.finished_step()
        if finished is not None and step == 0:
            raise ConfigError(
                f"{self.path} holds a finished run of {finished} steps, but none of its checkpoints",
                f"Its checkpoints are needed to go on, and to know that it is done: put them back, or choose another"
                f" trainer.output_dir. {self._say_export()}".rstrip(),
            )
        if finished is not None and finished >= total_steps and step >= finished:
            return Start(checkpoint, finished, finished=True)
        if step > total_steps:
            raise ConfigError(
                f"{checkpoint} is {step} steps old, and this run shall have {total_steps}",
                "Raise trainer.steps (or epochs), or choose another trainer.output_dir.",
            )
        self._check_metrics(step)
        return Start(checkpoint, step, finished=False)

    def _check_metrics(self, step: int) -> None:
        """Going on from `step` cuts metrics.jsonl behind it; where lines before it are lost, that would lose more."""
        found = [line["step"] for line in read_metrics(self.metrics)]
        whole = found == list(range(found[0], found[0] + len(found))) if found else not holds_lines(self.metrics)
        if step and not (whole and (not found or found[0] > step or found[-1] >= step)):
            last = f"ends, or can't be read, behind step {found[-1]}" if found else "can't be read"
            raise ConfigError(
                f"{self.metrics} {last}, but the run would go on from step {step}: its lines would be lost",
                "Mend it, or move it away: the run then begins another one there.",
            )

    def _say_export(self) -> str:
        there = (self.export / "config.json").is_file()
        return f"Its export is {self.export}, from which model.path can start another run." if there else ""

    def _refuse_damage(self) -> None:
        """Going on from before a damaged checkpoint would write over it; whether it is lost is the user's to say."""
        listing = CheckpointStore(self.checkpoints).listing()
        latest = max(listing.complete, default=0)
        damaged = {path: why for path, why in listing.damaged.items() if checkpoint_number(path) > latest}
        if damaged:
            names = ", ".join(path.name for path in damaged)
            onward = f"goes on from {listing.complete[latest].name}" if latest else "starts afresh"
            raise CheckpointError(
                "\n".join(damaged.values()),
                f"Restore {names} from a copy, or move it away: the same command then {onward}.",
            )

    def _check_nothing_later(self, checkpoint: Path, step: int) -> None:
        """A run that goes on from an older point would leave two futures in one folder."""
        mine = checkpoint.resolve().parent == self.checkpoints.resolve()
        others = [each for each in self.steps() if not mine or each > step]
        if others:
            names = ", ".join(f"step-{each}" for each in others)
            raise ConfigError(
                f"trainer.resume names {checkpoint}, but {self.path} already holds {names}",
                "Choose another trainer.output_dir, or remove them.",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold it for this process; whoever else wants it is refused with `ConfigError`.

        Where the body raises and nothing was written meanwhile, the folder is left as it was found.
        """
        from engines.recipes.output.holding import LOCK, holding

        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        fresh = not (self.path / LOCK).exists()
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(holding(self.path))
            except OSError as error:
                raise ConfigError(f"trainer.output_dir: {self.path} can't be written: {error.strerror}") from None
            try:
                yield
            except BaseException:
                if fresh and not self.holds_run():
                    (self.path / LOCK).unlink(missing_ok=True)
                    _remove_empty(created)
                raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # not empty: somebody else put something there
            return
