"""What is said about how a run goes on that ended early is what it then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.recipes.output.folder import OutputFolder
from engines.recipes.sft.config import TrainerConfig
from engines.recipes.sft.onward import onward
from support.checkpoints import save_whole

OLD = "earlier/checkpoints/step-2"
SAVED, NONE, AUTO = "step 4 is the last one saved", "no checkpoint was saved", " with trainer.resume=auto"
CASES: list[tuple[dict[str, Any], int, tuple[str, str]]] = [
    ({}, 4, (SAVED, "the same command goes on from there")),
    ({}, 0, (NONE, "the same command starts afresh")),
    ({"resume": "never"}, 4, (SAVED, f"the same command{AUTO} goes on from there")),
    ({"resume": "never"}, 0, (NONE, f"the same command{AUTO} starts afresh")),
    ({"resume": OLD}, 4, (SAVED, f"the same command{AUTO} goes on from there")),
    ({"resume": OLD}, 0, (NONE, f"the same command goes on from {OLD} again")),
    ({"resume": "out/checkpoints/step-4"}, 4, (SAVED, "the same command goes on from there")),
    ({"checkpoint_contents": ("model",)}, 4, (SAVED, "start another run from its weights (model.path)")),
    ({"checkpoint_contents": ("model",)}, 0, (NONE, "the same command starts afresh")),
]


@pytest.mark.parametrize(("settings", "saved", "said"), CASES)
def test_what_is_true_is_said(
    settings: dict[str, Any], saved: int, said: tuple[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = OutputFolder(Path("out"))
    trainer = TrainerConfig(mini_batch_size=1, steps=9, output_dir="out", **settings)
    save_whole(Path(OLD), step=2)
    folder.path.mkdir()
    folder.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    if saved:
        save_whole(folder.checkpoint(saved), step=saved)
    assert onward(folder, trainer) == said
    if said[1].startswith("the same command"):
        start = folder.start("auto" if AUTO in said[1] else trainer.resume, total_steps=9)
        assert start.step == (2 if OLD in said[1] else saved)
