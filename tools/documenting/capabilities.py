"""What engines can do, from their manifests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from documenting import ROOT
from documenting.tables import code, table
from engines.capabilities import CAPABILITIES
from engines.config import EngineConfig, capability_of
from engines.manifest import EngineEntry, Manifest, parse_manifest


@dataclass(frozen=True)
class Owned:
    """An `[[engine]]` and the distribution that declares it."""

    distribution: str
    entry: EngineEntry


def entries() -> list[Owned]:
    """Every `[[engine]]` of this repository, in the order of its distributions."""
    return [Owned(name, entry) for name, manifest in _manifests() for entry in manifest.engine]


def settings_classes() -> dict[type[EngineConfig], list[Owned]]:
    """The settings of this repository's engines, and who has them."""
    found: dict[type[EngineConfig], list[Owned]] = {}
    for one in entries():
        module, _, name = one.entry.config.partition(":")
        found.setdefault(getattr(import_module(module), name), []).append(one)
    return found


def capability_words() -> str:
    """The vocabulary, what each word means, and which settings need it."""
    rows = ((f"`{word}`", meaning, _settings_of(word)) for word, meaning in CAPABILITIES.items())
    return table(("capability", "what it says", "needed by"), rows)


def capability_matrix() -> str:
    """Every capability by every engine of this repository."""
    columns = [(one, f"{one.entry.backend[0]} on {', '.join(one.entry.device)}") for one in entries()]
    rows = ([f"`{word}`", *(_mark(one.entry, word) for one, _ in columns)] for word in CAPABILITIES)
    return table(["capability", *(heading for _, heading in columns)], rows)


def engine_facts(distribution: str) -> str:
    """Where the engines of a distribution run, and what they can do."""
    found = [one.entry for one in entries() if one.distribution == distribution]
    assert found, f"no distribution {distribution}"
    where = table(
        ("backend", "device", "model types", "priority", "needs"),
        (
            (code(one.backend), code(one.device), code(one.model_type), str(one.priority), code(one.needs))
            for one in found
        ),
    )
    devices = [(one, device) for one in found for device in one.device]
    rows = (
        [f"`{word}`", meaning, _settings_of(word), *(_mark(one, word) for one, _ in devices)]
        for word, meaning in CAPABILITIES.items()
    )
    return where + "\n" + table(["capability", "what it says", "needed by", *(name for _, name in devices)], rows)


def _manifests() -> Iterator[tuple[str, Manifest]]:
    for path in sorted(ROOT.glob("plugins/*/src/*/engine.toml")):
        yield f"engines-{path.relative_to(ROOT).parts[1]}", parse_manifest(Path(path).read_bytes())


def _mark(entry: EngineEntry, word: str) -> str:
    return "yes" if word in entry.capabilities else "-"


def _settings_of(word: str) -> str:
    keys = {
        f"engine.{key}": None
        for settings in (EngineConfig, *settings_classes())
        for key, info in settings.model_fields.items()
        if capability_of(info) == word
    }
    return code([*keys, *OTHERWISE.get(word, [])])


OTHERWISE = {
    "bfloat16": ["model.dtype=bfloat16"],
    "deterministic": ["trainer.deterministic"],
    "entropy": ["infer_batch(needs=('entropy',))"],
    "export": ["trainer.export", "get_per_tensor_param()"],
    "lora": ["disable_adapter()"],
    "offload": ["to()"],
}
"""What needs a capability and isn't a setting of the engine's, by the code that refuses it."""
