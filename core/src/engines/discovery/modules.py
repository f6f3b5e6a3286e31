"""Modules found without running any code, not even that of their parents.

`importlib.util.find_spec("a.b")` imports `a`, which for a backend that patches others on import is already
too much; so the finders are walked here with each parent's own search locations.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec


def find_module(dotted: str) -> ModuleSpec | None:
    """The spec under which `import dotted` would find a module, or None. Imports nothing.

    A module that is already imported answers with its own spec.
    """
    if dotted in sys.modules:
        return _imported(dotted)
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _imported(name) if name in sys.modules else _ask_finders(name, path)
        if spec is None:
            return None
        if depth < len(parts):
            path = _search_locations(name, spec)
            if path is None:
                return None
    return spec


def is_namespace(spec: ModuleSpec) -> bool:
    """Whether the spec is of a folder without `__init__.py`: findable, but nothing is in it."""
    return spec.origin is None and spec.submodule_search_locations is not None


def _imported(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None:  # what blocks an import
        return None
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    return spec or ModuleSpec(name, None, origin=getattr(module, "__file__", None) or "made in this process")


def _search_locations(name: str, spec: ModuleSpec) -> list[str] | None:
    """Where the submodules of a package are; an imported one may have changed its `__path__`."""
    locations = getattr(sys.modules.get(name), "__path__", spec.submodule_search_locations)
    return None if locations is None else list(locations)


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        try:
            spec: ModuleSpec | None = find_spec(name, path)
        except KeyError:  # a namespace package below a parent that is not imported: importlib looks for the parent
            spec = _nested_namespace(name, path or ())
        if spec is not None:
            return spec
    return None


def _nested_namespace(name: str, path: Sequence[str]) -> ModuleSpec | None:
    from pkgutil import get_importer

    portions: list[str] = []
    for entry in path:
        importer = get_importer(entry)
        spec = importer.find_spec(name) if importer is not None else None
        if spec is not None:
            portions.extend(spec.submodule_search_locations or ())
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def missing_attribute(dotted: str) -> str | None:
    """Why `package.module:name` cannot be imported, as far as can be said without running it; else None."""
    module, _, name = dotted.partition(":")
    spec = find_module(module)
    if spec is None:
        return f"there is no module {module}"
    if is_namespace(spec):
        return f"{module} is a folder without __init__.py"
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(module) if get_source is not None else None
    if source is None or re.search(rf"^(class|def) {name}\b", source, re.MULTILINE):
        return None
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return f"{spec.origin}, line {error.lineno}: {error.msg}"
    return None if _may_bind(tree, name) else f"{spec.origin} has no {name}"


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Whether a module's code could bind `name`: by a statement, a star import or something dynamic."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=found, ctx=ast.Store()) if found == name:
                return True
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found in (name, "__getattr__"):
                return True
            case ast.alias(name=found, asname=alias) if (alias or found) in (name, "*"):
                return True
            case ast.Name(id="globals" | "setattr" | "exec", ctx=ast.Load()):
                return True
            case _:
                pass
    return False
