"""Whatever users and authors can name is in the docs: hooks, commands, options, settings, capabilities, exports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module

import click
import pytest

import engines
from documenting import ROOT
from documenting.capabilities import settings_classes
from documenting.clauses import SHOWN_ON
from documenting.commands import every_command
from engines.capabilities import CAPABILITIES
from engines.config import EngineConfig
from engines.engine.binding import HOOKS
from engines.manifest import DeviceEntry, EngineEntry, Manifest
from engines.recipes.sft.config import SFTRecipe

PAGES = {page.stem: page.read_text() for page in ROOT.glob("docs/*.md")}
BY_HAND = {
    name: re.sub(r"<!-- generated: .*?<!-- until here -->", "", text, flags=re.DOTALL) for name, text in PAGES.items()
}


def lacking(words: set[str], text: str) -> set[str]:
    """Those of the words that a text doesn't have, as words."""
    return {word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_guide_explains_each_hook(hook: str) -> None:
    assert not lacking({hook}, BY_HAND["contract"])
    parameters = set(inspect.signature(HOOKS[hook]).parameters) - {"self"}
    assert not lacking({hook} | parameters, PAGES["writing-an-engine"])


@pytest.mark.parametrize("ctx", list(every_command()), ids=lambda ctx: ctx.command_path)
def test_each_command_and_its_options(ctx: click.Context) -> None:
    options = {
        option
        for parameter in ctx.command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if isinstance(parameter, click.Option)
    }
    section = PAGES["commands"].partition(f"# {ctx.command_path}\n")[2].partition("\n#")[0]
    assert section
    assert not lacking(options, section)
    shown = re.findall(r"(?:^|`|\$ )(engines [a-z -]+)", "\n".join(BY_HAND.values()), re.MULTILINE)
    assert any(f"{line} ".startswith(f"{ctx.command_path} ") for line in shown), "no page says what it is for"


def keys() -> Iterator[str]:
    for part, info in SFTRecipe.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        yield from (f"{part}.{key}" for key in inner) if inner else [part]
    for settings in settings_classes():
        yield from (f"engine.{key}" for key in settings.model_fields)


def test_each_setting_is_in_the_reference() -> None:
    assert not {key for key in keys() if f"| `{key}` |" not in PAGES["configuration"]}


def test_each_capability_and_key_of_the_manifest() -> None:
    named = set(CAPABILITIES)
    for table in (Manifest, EngineEntry, DeviceEntry):
        named |= set(table.model_fields)
    assert not {word for word in named if f"| `{word}` |" not in PAGES["manifest"]}


def test_each_capability_that_a_setting_needs_is_a_word() -> None:
    for settings in (EngineConfig, *settings_classes()):
        for info in settings.model_fields.values():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and "capability" in extra:
                assert extra["capability"] in CAPABILITIES


def test_each_public_name_is_spoken_of() -> None:
    prose = "\n".join(BY_HAND.values())
    assert not lacking(set(engines.__all__), prose)


def test_each_public_name_has_its_docstring_on_the_site() -> None:
    reference = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    assert lacking(set(engines.__all__), reference) == {"EnginesError"}, "its tree is in troubleshooting.md"


def test_what_the_site_shows_is_there() -> None:
    """mkdocstrings leaves out without a word what it doesn't find."""
    shown = [name.rpartition(".") for name in SHOWN_ON]
    assert not [f"{home}.{name}" for home, _, name in shown if not hasattr(import_module(home), name)]


@pytest.mark.parametrize("owner", [engines.Engine, engines.TrainingWorker], ids=lambda owner: owner.__name__)
def test_each_public_method_is_spoken_of(owner: type) -> None:
    methods = {name for name, member in vars(owner).items() if not name.startswith("_") and inspect.isroutine(member)}
    assert not lacking(methods, "\n".join(BY_HAND.values()))
