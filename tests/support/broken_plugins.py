"""The table of broken plugins: each a distribution, what is done to it, and what must be said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.fake_plugins import ENGINE, FakePlugin, manifest, plugin


@dataclass(frozen=True)
class Case:
    """A distribution, what is done to it once installed, and what must be said about it."""

    plugin: FakePlugin
    cause: str
    remedy: str
    file: str
    """How the path of the file at fault ends."""
    damage: Callable[[Path], None] | None = None
    """Is given site-packages."""
    entry_point: str | None = None


def entry(name: str, **keys: str) -> str:
    return manifest(f"fake_{name}", name, **keys)


def without(name: str, *left_out: str, generator: str = "hatchling 1.27") -> FakePlugin:
    made = plugin(name)
    files = {path: content for path, content in made.files.items() if not path.endswith(left_out)}
    return plugin(name, files=files, generator=generator)


def with_module(name: str, module: str, text: str) -> FakePlugin:
    """Whose engine's module imports another one."""
    made = plugin(name, code=f"from fake_{name} import {module}\n" + ENGINE)
    return plugin(name, files={**made.files, f"fake_{name}/{module}.py": text})


def remove(*parts: str) -> Callable[[Path], None]:
    def damage(site: Path) -> None:
        path = site.joinpath(*parts)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def second_dist_info(name: str, folder: str) -> Callable[[Path], None]:
    def damage(site: Path) -> None:
        shutil.copytree(site / f"engines_{name}-1.0.dist-info", site / folder)
        (site / folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: engines-{name}\nVersion: 0.9\n")

    return damage


def editable_with_leftover(site: Path) -> None:
    """What `pip install -e` of a project with an old build's egg-info in its sources looks like."""
    project = site.parent / "project"
    sources = project / "src"
    sources.mkdir(parents=True)
    shutil.move(site / "fake_edited", sources / "fake_edited")
    egg_info = sources / "engines_edited.egg-info"
    egg_info.mkdir()
    (egg_info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: engines-edited\nVersion: 0.1\n")
    (egg_info / "entry_points.txt").write_text("[engines]\nformerly = fake_formerly\n")
    dist_info = site / "engines_edited-1.0.dist-info"
    url = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (dist_info / "direct_url.json").write_text(json.dumps(url))
    (dist_info / "RECORD").write_text("engines_edited.pth,,\nengines_edited-1.0.dist-info/RECORD,,\n")
    (site / "engines_edited.pth").write_text(str(sources))


CHIP = '\n[[device]]\nname = "chip"\nrank = {rank}\nmodule = "torch_chip"\ndist_backend = "gloo"\n'

CASES = {
    "manifest missing": Case(
        without("unwritten", "engine.toml"),
        "the manifest is missing: the wheel was built without it",
        "build the wheel with engine.toml",
        "fake_unwritten/engine.toml",
    ),
    "wheel of setuptools without its manifest": Case(
        without("packed", "engine.toml", generator="setuptools (80.9.0)"),
        "the wheel was built without it",
        "[tool.setuptools.package-data]",
        "fake_packed/engine.toml",
    ),
    "manifest deleted": Case(
        plugin("deleted"),
        "the manifest is missing although it was installed",
        "pip install --force-reinstall --no-deps engines-deleted",
        "fake_deleted/engine.toml",
        remove("fake_deleted", "engine.toml"),
    ),
    "manifest not installed": Case(
        without("planted", "engine.toml"),
        "not among the files that this distribution installed",
        "build the wheel",
        "fake_planted/engine.toml",
        lambda site: (site / "fake_planted" / "engine.toml").write_text(entry("planted")) and None,
    ),
    "not TOML": Case(plugin("nottoml", "api = = 1"), "not TOML: ", "mend its syntax", "fake_nottoml/engine.toml"),
    "not UTF-8": Case(
        plugin("notutf8", b'api = 1\nsummary = "caf\xe9"\n'),
        "not UTF-8: ",
        "save it as UTF-8",
        "fake_notutf8/engine.toml",
    ),
    "empty": Case(plugin("empty", ""), "the manifest is empty", "at least `api = 1`", "fake_empty/engine.toml"),
    "only a comment": Case(
        plugin("comment", "# later\n"), "the manifest is empty", "at least `api = 1`", "fake_comment/engine.toml"
    ),
    "unknown key": Case(
        plugin("misspelt", entry("misspelt", priorty="3")),
        '`engine[0].priorty` is not a key. Did you mean "priority"?',
        "engines schema manifest",
        "fake_misspelt/engine.toml",
    ),
    "wrong type": Case(
        plugin("typed", entry("typed", priority='"high"')),
        "`engine[0].priority` is 'high'",
        "engines schema manifest",
        "fake_typed/engine.toml",
    ),
    "text for a list": Case(
        plugin("listless", entry("listless", device='"cpu"')),
        "`engine[0].device` must be a list, not str",
        "engines schema manifest",
        "fake_listless/engine.toml",
    ),
    "unknown capability": Case(
        plugin("boastful", entry("boastful", capabilities='["tensor_paralel"]')),
        'is not a capability of api 1. Did you mean "tensor_parallel"?',
        "engines schema manifest",
        "fake_boastful/engine.toml",
    ),
    "one key declared twice": Case(
        plugin("double", entry("double") + entry("double").partition("\n\n")[2]),
        "(language_model, double, cpu) is declared by two [[engine]] entries",
        "engines schema manifest",
        "fake_double/engine.toml",
    ),
    "a device of core described anew": Case(
        plugin("usurper", entry("usurper") + CHIP.format(rank=1).replace('"chip"', '"cuda"')),
        '"cuda" is described by core',
        "engines schema manifest",
        "fake_usurper/engine.toml",
    ),
    "api not spoken": Case(
        plugin("future", "api = 2\nnews = true\n"),
        "api 2 is not spoken",
        "upgrade engines-core",
        "fake_future/engine.toml",
    ),
    "api of another type": Case(
        plugin("apitrue", entry("apitrue").replace("api = 1", "api = true")),
        "`api` is True, not a whole number",
        "write `api = 1`",
        "fake_apitrue/engine.toml",
    ),
    "package gone": Case(
        plugin("gone"),
        "package fake_gone is gone",
        "pip uninstall engines-gone",
        "engines_gone-1.0.dist-info",
        remove("fake_gone"),
    ),
    "only a folder remains": Case(
        plugin("hollow"),
        "fake_hollow has lost its __init__.py",
        "pip install --force-reinstall",
        "fake_hollow",
        remove("fake_hollow", "__init__.py"),
    ),
    "entry point with an attribute": Case(
        plugin("pointed", value="fake_pointed.engine:Engine"),
        '"fake_pointed.engine:Engine" must be one top-level package',
        'write `pointed = "fake_pointed"`',
        "engines_pointed-1.0.dist-info/entry_points.txt",
    ),
    "namespace package": Case(
        without("open", "__init__.py"), "is a namespace package", "add an __init__.py", "fake_open"
    ),
    "single module": Case(
        plugin("single", files={"fake_single.py": ENGINE}),
        "is a single module",
        "make it a package",
        "fake_single.py",
    ),
    "somebody else's package": Case(
        plugin("borrowed", value="click"),
        "click is not among the files that this distribution installed",
        "name the distribution's own package",
        "click",
    ),
    "id claimed by two": Case(
        plugin("claim", distribution="engines-claim-a"),
        'two distributions claim the id "claim": engines-claim-a and engines-claim-b',
        "uninstall one of them",
        "fake_claim/engine.toml",
    ),
    "id claimed by two, the other": Case(
        plugin(
            "claimant",
            manifest("fake_claimant", "claimant"),
            distribution="engines-claim-b",
            entry_point="claim",
        ),
        'two distributions claim the id "claim": engines-claim-a and engines-claim-b',
        "uninstall one of them",
        "fake_claimant/engine.toml",
    ),
    "key claimed by two": Case(
        plugin("left", manifest("fake_left", "contested")),
        "engines-left and engines-right claim contested on cpu with equal priority 100",
        "write contested@engines-left",
        "fake_left/engine.toml",
    ),
    "key claimed by two, the other": Case(
        plugin("right", manifest("fake_right", "contested")),
        "engines-left and engines-right claim contested on cpu with equal priority 100",
        "write contested@engines-right",
        "fake_right/engine.toml",
    ),
    "device described by two": Case(
        plugin("chipone", entry("chipone") + CHIP.format(rank=1)),
        'distributions describe the device "chip" differently: engines-chipone and engines-chiptwo',
        "uninstall all but one",
        "fake_chipone/engine.toml",
    ),
    "device described by two, the other": Case(
        plugin("chiptwo", entry("chiptwo") + CHIP.format(rank=2)),
        'distributions describe the device "chip" differently: engines-chipone and engines-chiptwo',
        "uninstall all but one",
        "fake_chiptwo/engine.toml",
    ),
    "stale metadata": Case(
        plugin("twice"),
        "stale metadata: 2 installations of engines-twice in one place",
        "delete all but the true one",
        ".dist-info",
        second_dist_info("twice", "engines_twice-0.9.dist-info"),
    ),
    "interrupted upgrade": Case(
        plugin("torn"),
        "stale metadata: 2 installations of engines-torn in one place",
        "delete all but the true one",
        ".dist-info",
        second_dist_info("torn", "~ngines_torn-0.9.dist-info"),
    ),
    "leftover egg-info": Case(
        plugin("edited"),
        "stale metadata: a leftover of a build declares it",
        "delete that folder",
        "src/engines_edited.egg-info",
        editable_with_leftover,
        entry_point="formerly",
    ),
    "engine module absent": Case(
        plugin("homeless", entry("homeless", engine='"fake_homeless.motor:Engine"')),
        "there is no module fake_homeless.motor",
        "mend the manifest or the package",
        "fake_homeless/engine.toml",
    ),
    "engine class absent": Case(
        plugin("classless", code="class Config:\n    '''Not an Engine.'''\n"),
        "fake_classless/engine.py has no Engine",
        "mend the manifest or the package",
        "fake_classless/engine.toml",
    ),
    "config class absent": Case(
        plugin("unset", code="class Engine:\n    pass\n"),
        "fake_unset/engine.py has no Config",
        "mend the manifest or the package",
        "fake_unset/engine.toml",
    ),
    "device misspelt": Case(
        plugin("astray", entry("astray", device='["npuu"]')),
        'nobody describes the device "npuu". Did you mean "npu"?',
        "mend `device` in the manifest",
        "fake_astray/engine.toml",
    ),
    "engine module not Python": Case(
        plugin("garbled", code="class Engine(:\n"),
        "fake_garbled/engine.py, line 1",
        "mend",
        "fake_garbled/engine.toml",
    ),
}

LOADED = {
    "import raises an exception": Case(
        plugin("raising", code=ENGINE + "\nraise RuntimeError('no license')\n"),
        'config = "fake_raising.engine:Config": importing it raised RuntimeError: no license',
        "upgrade engines-raising",
        "fake_raising/engine.py:8",
    ),
    "import exits": Case(
        plugin("exiting", code=ENGINE + "\nimport sys\nsys.exit(3)\n"),
        "importing it raised SystemExit(3)",
        "parses sys.argv",
        "fake_exiting/engine.py:9",
    ),
    "import lacks a module": Case(
        plugin("lacking", code="import absent_library\n" + ENGINE),
        "No module named 'absent_library'",
        "install absent_library",
        "fake_lacking/engine.py:1",
    ),
    "import meets what is no Python": Case(
        with_module("unparsed", "model", "ready = True\nclass Model(:\n"),
        "importing it raised SyntaxError",
        "mend that line if it is yours, else reinstall engines-unparsed",
        "fake_unparsed/model.py:2",
    ),
    "import kills the process": Case(
        plugin("killing", code=ENGINE + "\nimport os\nos._exit(7)\n"),
        "the process that loads it ended with code 7",
        "tell its author",
        "fake_killing/engine.toml",
    ),
    "engine is no class": Case(
        plugin("functional", code=ENGINE.replace("class Engine:", "def Engine():")),
        'engine = "fake_functional.engine:Engine" is not a class but function',
        "tell its author",
        "fake_functional/engine.toml",
    ),
}
