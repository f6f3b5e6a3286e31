"""Imports only ever point downwards, whether they stand at the top of a module or in a function."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/src/engines"
PLUGINS = sorted(path for path in ROOT.glob("plugins/*/src/engines_*") if path.is_dir())

FLOORS = {
    0: """availability capabilities choosing devices discovery durable errors loading manifest paths process registry
          requirements selection torch_extensions""",
    1: """batch checkpoint_folder config configuring contract model_folder""",
    2: """agreement checkpoint determinism device_services engine losses microbatch models optimizer process_group
          tracing versions weights""",
    3: """launch worker""",
    4: """__main__ cli recipes scaffold testing verifying""",
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}
HEAVY = {"torch", "transformers", "numpy", "ray", "pyarrow", "matplotlib"}
BUILDS_ON = {"engines_mindspeed": {"engines_megatron"}}
"""Plugins that may import another plugin, and which."""


def python_files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def imported_modules(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that `file` imports anywhere, by absolute name, with its line."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "engines":  # `from engines import batch` names the room last
                yield from ((f"engines.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def room_of(file: Path) -> str:
    return file.relative_to(CORE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> Iterator[tuple[str, int]]:
    """The other rooms of core that a file of core imports, with lines."""
    for module, line in imported_modules(file):
        package, _, inside = module.partition(".")
        room = inside.partition(".")[0]
        if package == "engines" and room and room != room_of(file):
            yield room, line


def rooms() -> list[Path]:
    """Files of core that stand on a floor: all but the package's own `__init__`, which is the way in."""
    return [file for file in python_files(CORE) if file != CORE / "__init__.py"]


def report(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_every_room_stands_on_a_floor() -> None:
    found = {room_of(file) for file in rooms()}
    assert found == set(FLOOR_OF), "say in FLOORS where new rooms stand, and take out those that are gone"


def test_imports_point_downwards() -> None:
    report(
        [
            f"{file.relative_to(ROOT)}:{line} imports {room} (floor {FLOOR_OF[room]}) from floor {floor}"
            for file in rooms()
            for floor in [FLOOR_OF[room_of(file)]]
            for room, line in imported_rooms(file)
            if FLOOR_OF[room] > floor
        ]
    )


def test_rooms_import_each_other_without_cycles() -> None:
    imports: dict[str, set[str]] = defaultdict(set)
    for file in rooms():
        imports[room_of(file)].update(room for room, _ in imported_rooms(file))
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("rooms in a circle: " + " imports ".join(reversed(error.args[1])))


def test_floor_0_imports_nothing_heavy() -> None:
    report(
        [
            f"{file.relative_to(ROOT)}:{line} imports {module} on floor 0"
            for file in rooms()
            if FLOOR_OF[room_of(file)] == 0
            for module, line in imported_modules(file)
            if module.partition(".")[0] in HEAVY
        ]
    )


def test_core_imports_no_plugin() -> None:
    report(
        [
            f"{file.relative_to(ROOT)}:{line} imports the plugin {module}"
            for file in python_files(CORE)
            for module, line in imported_modules(file)
            if module.startswith("engines_")
        ]
    )


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugins_do_not_import_each_other(plugin: Path) -> None:
    allowed = {plugin.name} | BUILDS_ON.get(plugin.name, set())
    report(
        [
            f"{file.relative_to(ROOT)}:{line} imports {module}"
            for file in python_files(plugin)
            for module, line in imported_modules(file)
            for package in [module.partition(".")[0]]
            if package.startswith("engines_") and package not in allowed
        ]
    )


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda package: package.name)
def test_files_stay_small(package: Path) -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in python_files(package)}
    report([f"{file.relative_to(ROOT)}: {length} lines" for file, length in lengths.items() if length > 500])
