"""Every number of the settings, by the settings' own classes: negative, NaN, infinite and absurdly large ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from engines.cli.main import main
from engines.recipes.sft.config import SFTRecipe
from engines_fsdp.config import FSDP2Config
from engines_megatron.config import MegatronConfig
from support.commands import recipe, snapshot

ENGINES: dict[str, type[BaseModel]] = {"fsdp2": FSDP2Config, "megatron": MegatronConfig}
HUGE = str(10**30)


def numbers(annotation: Any) -> set[type]:
    """int and float, as far as values of this type hold such."""
    return {annotation} & {int, float} | {found for inner in get_args(annotation) for found in numbers(inner)}


def fields(strategy: str) -> Iterator[tuple[str, set[type], bool]]:
    """(dotted key, kinds of number, whether it is a list) of every number in a recipe."""
    sections = {name: info.annotation for name, info in SFTRecipe.model_fields.items()}
    for section, model in {**sections, "engine": ENGINES[strategy]}.items():
        for field, info in (getattr(model, "model_fields", None) or {}).items():
            if kinds := numbers(info.annotation):
                yield f"{section}.{field}", kinds, "tuple" in str(info.annotation)


@pytest.mark.parametrize("strategy", ENGINES)
def test_every_number_is_there(strategy: str) -> None:
    """So that the test below tests something."""
    found = {key for key, _, _ in fields(strategy)}
    assert found > {"optimizer.lr", "optimizer.betas", "trainer.steps", "launch.nproc", "engine.micro_batch_size"}
    assert len(found) > 20


@pytest.mark.parametrize("value", ["-1", "nan", ".inf", "-.inf", "-1e400", "true", "''", "{}", "fast", HUGE, "2.5"])
@pytest.mark.parametrize("strategy", ENGINES)
def test_meaningless_ones_are_refused(
    strategy: str, value: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """All at once: every one is named, with what was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINES_DEVICE", raising=False)
    recipe(tmp_path)
    before = snapshot(tmp_path)
    asked = {key: f"[{value}]" if lists else value for key, kinds, lists in fields(strategy) if fits(value, kinds)}
    overrides = [f"{key}={given}" for key, given in asked.items()]
    assert main(["train", "recipe.yaml", f"engine.strategy={strategy}", *overrides]) == 2
    said = capsys.readouterr().err
    lines = said.removeprefix("Error: ").splitlines()
    for key in asked:
        assert any(line.startswith(key) and ", got " in line for line in lines), (key, said)
    assert snapshot(tmp_path) == before


def fits(value: str, kinds: set[type]) -> bool:
    """Whether it is meaningless for such a number."""
    return value not in (HUGE, "2.5") or kinds == {int}
