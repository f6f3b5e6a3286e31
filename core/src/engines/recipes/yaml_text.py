"""YAML as its version 1.2 reads it: `yes` and `on` are words, `1:30` is no number.

PyYAML reads version 1.1, in which they are true, true and 90, and 010 is 8. What both read alike stays as it is; a
number with a leading zero, which either reads as another one, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from engines.errors import ConfigError

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
"""What a plain scalar is, if it isn't a word: the core schema of YAML 1.2, and merge keys. The first that fits."""
_MOST_NODES: Final = 10_000
_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9]+")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (as PyYAML declares it)


for _kind, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


def read_yaml(text: str, source: str) -> Any:
    """The plain data of one document; None for an empty one. `source`: what to call it in messages.

    Raises `ConfigError` for a key that stands twice, for a number with a leading zero, and for aliases without
    end; `YAMLError` or ValueError for what is no YAML.
    """
    loader = _Loader(text)
    loader.name = source
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        one_line = node.end_mark.line == 0
        _Checks(lambda part: source if one_line else f"{source}, line {part.start_mark.line + 1}").check(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


class _Checks:
    """Of each node of a document, and of what aliases repeat, each time."""

    def __init__(self, place: Callable[[Node], str]) -> None:
        """`place`: where a node stands, as messages name it."""
        self._place = place
        self._seen = 0

    def check(self, node: Node, key: str = "", around: tuple[Node, ...] = ()) -> None:
        """`key`: the node's own, dotted; `around`: the nodes that it stands in."""
        self._seen += 1
        if self._seen > _MOST_NODES or any(node is outer for outer in around):
            raise ConfigError(f"{self._place(node)}: {key} repeats aliases without end")
        match node:
            case MappingNode():
                self._check_keys(node, key)
                for name, value in node.value:
                    self.check(value, f"{key}.{name.value}".lstrip("."), (*around, node))
            case SequenceNode():
                for index, value in enumerate(node.value):
                    self.check(value, f"{key}.{index}".lstrip("."), (*around, node))
            case ScalarNode(tag="tag:yaml.org,2002:int") if _LEADING_ZERO.fullmatch(node.value):
                self._refuse(node, key)

    def _check_keys(self, node: MappingNode, key: str) -> None:
        first: dict[str, Node] = {}
        for name, _ in node.value:
            if not isinstance(name, ScalarNode):
                continue
            earlier = first.setdefault(name.value, name)
            if earlier is not name:
                line, full = earlier.start_mark.line, f"{key}.{name.value}".lstrip(".")
                first_in = f", first in line {line + 1}" if line != name.start_mark.line else ""
                raise ConfigError(f"{self._place(name)}: {full} stands twice{first_in}", "Remove one of them.")

    def _refuse(self, node: ScalarNode, key: str) -> None:
        digits = node.value
        octal = int(digits, 8) if set(digits) <= set("+-01234567") else "no number"
        raise ConfigError(
            f"{self._place(node)}: {key + ': ' if key else ''}{digits} begins with a zero, and is {octal} in YAML"
            f" 1.1, {int(digits)} in YAML 1.2",
            f'Write {int(digits)}, or "{digits}" in quotes to mean the text.',
        )
