"""Read YAML as plain values, with the line of each key, so that a problem can say where it is.

A configuration is text, numbers, true and false, lists and mappings. All else that YAML has is
refused or is text: tags, aliases (300 bytes of them make gigabytes), dates, sexagesimal and binary
numbers that are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ckptsync.errors import ConfigError

LIMIT = 256 << 10
"""Bytes of a file: a hundred times a long configuration, and some seconds for PyYAML."""
_DEEPEST = 50
_LONGEST = 100  # characters of a number
_TAG = "tag:yaml.org,2002:"
_NUMBERS = {f"{_TAG}int": "int", f"{_TAG}float": "float"}
_WORDS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value", f"{_TAG}merge"}


@dataclass(frozen=True, slots=True)
class Document:
    """``values``: what the file says.

    ``lines``: the line of each key by its path (``worker.quiet``).  ``twice``: keys given twice.
    """

    values: object
    lines: dict[str, int]
    twice: tuple[str, ...]


def parse(text: str, name: str) -> Document:
    """Return the values of a YAML document, with the line of each key.

    Raises ConfigError, with the line where there is one, for what is not YAML or more than plain
    values.

    Every key is a string as it is written, so that ``on`` is a word.
    """
    if len(text) > LIMIT:
        raise ConfigError(
            f"{name}: {len(text)} characters, at most {LIMIT} expected of a configuration"
        )
    try:
        root = _Loader(text).get_single_node()
        lines: dict[str, int] = {}
        twice: dict[str, None] = {}
        values = None if root is None else _value(root, "", lines, twice)
    except _NotPlainError as e:
        raise ConfigError(f"{name}:{e.line}: not plain YAML: {e}") from e
    except yaml.MarkedYAMLError as e:
        where = f"{name}:{e.problem_mark.line + 1}" if e.problem_mark else name
        raise ConfigError(f"{where}: not YAML: {e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # of a character that is none, too
        raise ConfigError(f"{name}: not YAML: {' '.join(str(e).split())}") from e
    return Document(values, lines, tuple(twice))


class _NotPlainError(Exception):
    def __init__(self, text: str, at: yaml.Event | yaml.Node) -> None:
        super().__init__(text)
        self.line = at.start_mark.line + 1 if at.start_mark else 1


class _Loader(yaml.SafeLoader):
    """Composes nodes, and nothing from them."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _NotPlainError("an alias (*name) is not read here: write its values out", event)
        if self._depth == _DEEPEST:
            raise _NotPlainError(f"more than {_DEEPEST} levels", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _value(node: yaml.Node, path: str, lines: dict[str, int], twice: dict[str, None]) -> Any:
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value(item, f"{path}[].", lines, twice) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return dict(_items(node, path, lines, twice))
    if not isinstance(node, yaml.ScalarNode):
        raise _NotPlainError(f"a value of type {node.tag!r:.80}", node)
    return _scalar(node)


def _items(
    node: yaml.MappingNode, path: str, lines: dict[str, int], twice: dict[str, None]
) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
            raise _NotPlainError("a key that is no word", key)
        full = f"{path}{key.value}"
        if key.value in seen:
            twice[full] = None
        seen.add(key.value)
        lines[full] = key.start_mark.line + 1
        yield key.value, _value(value, f"{full}.", lines, twice)


_READER = yaml.constructor.SafeConstructor()


def _scalar(node: yaml.ScalarNode) -> Any:
    if any("\ud800" <= c <= "\udfff" for c in node.value):
        raise _NotPlainError("half a character", node)
    if node.tag in _WORDS:
        return node.value
    if node.tag in (f"{_TAG}null", f"{_TAG}bool"):
        try:
            return None if node.tag.endswith("null") else _READER.construct_yaml_bool(node)
        except KeyError:
            raise _NotPlainError("neither true nor false", node) from None
    if node.tag not in _NUMBERS:
        raise _NotPlainError(f"a value of type {node.tag!r:.80}", node)
    try:
        if len(node.value) > _LONGEST:
            raise ValueError("too long")  # noqa: TRY301 - as `int` says of more
        return (
            _READER.construct_yaml_int(node)
            if _NUMBERS[node.tag] == "int"
            else _READER.construct_yaml_float(node)
        )
    except (ValueError, IndexError, OverflowError):
        raise _NotPlainError(
            "no number, though YAML takes it for one: put it in quotes if it is text", node
        ) from None
