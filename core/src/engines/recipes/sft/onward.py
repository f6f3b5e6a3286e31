"""What is left of a run that ends early, and how it goes on; imports no torch."""

from __future__ import annotations

from pathlib import Path

from engines.checkpoint_folder.manifest import RESUMABLE
from engines.recipes.output.folder import OutputFolder
from engines.recipes.sft.config import TrainerConfig


def last_saved(step: int) -> str:
    """`step`: of the latest checkpoint that is complete; 0: there is none."""
    return f"step {step} is the last one saved" if step else "no checkpoint was saved"


def onward(folder: OutputFolder, trainer: TrainerConfig) -> tuple[str, str]:
    """Two clauses: what is saved, and what to do to go on. The disk is asked, which may have lost some of it."""
    try:
        step = max(folder.steps(), default=0)
    except FileNotFoundError:  # they are being deleted
        step = 0
    except OSError as error:
        return f"{folder.checkpoints} can't be read ({error.strerror})", "the same command says from where it goes on"
    if step and not set(RESUMABLE) <= set(trainer.checkpoint_contents):
        return last_saved(step), "start another run from its weights (model.path)"
    from_path = trainer.resume not in ("auto", "never")
    if not step and from_path:
        return last_saved(step), f"the same command goes on from {trainer.resume} again"
    same = trainer.resume == "auto" or (from_path and _is(folder.checkpoint(step), trainer.resume))
    command = "the same command" if same else "the same command with trainer.resume=auto"
    return last_saved(step), f"{command} {'goes on from there' if step else 'starts afresh'}"


def _is(checkpoint: Path, named: str) -> bool:
    return checkpoint.resolve() == Path(named).expanduser().resolve()
