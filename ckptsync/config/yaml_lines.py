"""Read YAML as plain values, with the line of each key, so that a problem can say where it is.

A configuration is text, numbers, true and false, lists and mappings. All else that YAML has is
refused or is text: tags, aliases (300 bytes of them make gigabytes), dates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from ckptsync.errors import ConfigError

LIMIT = 256 << 10
"""Bytes of a file: a hundred times a long configuration, and some seconds for PyYAML."""
_DEEPEST = 50
_TAG = "tag:yaml.org,2002:"
_MAKER = yaml.constructor.SafeConstructor()
_READERS: dict[str, Callable[[yaml.ScalarNode], Any]] = {
    f"{_TAG}null": lambda _: None,
    f"{_TAG}bool": _MAKER.construct_yaml_bool,
    f"{_TAG}int": _MAKER.construct_yaml_int,
    f"{_TAG}float": _MAKER.construct_yaml_float,
    **{f"{_TAG}{word}": lambda node: node.value for word in ("str", "timestamp", "value", "merge")},
}


@dataclass(frozen=True, slots=True)
class Document:
    """``values``: what the file says.

    ``lines``: the line of each key by its path (``worker.quiet``).  ``twice``: keys given twice.
    """

    values: object = None
    lines: dict[str, int] = field(default_factory=dict)
    twice: dict[str, None] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """Return the values of a YAML document, with the line of each key.

    Raises ConfigError, with the line where there is one, for what is not YAML or more than plain
    values. Every key is a string as it is written, so that ``on`` is a word.
    """
    if len(text) > LIMIT:
        most = f"at most {LIMIT} expected of a configuration"
        raise ConfigError(f"{name}: {len(text)} characters, {most}")
    lines: dict[str, int] = {}
    twice: dict[str, None] = {}
    try:
        root = _Loader(text).get_single_node()
        return Document(None if root is None else _value(root, "", lines, twice), lines, twice)
    except _NotPlainError as e:
        raise ConfigError(f"{name}:{e.line}: not plain YAML: {e}") from e
    except yaml.MarkedYAMLError as e:
        where = f"{name}:{e.problem_mark.line + 1}" if e.problem_mark else name
        raise ConfigError(f"{where}: not YAML: {e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # of a character that is none, too
        raise ConfigError(f"{name}: not YAML: {' '.join(str(e).split())}") from e


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
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                raise _NotPlainError("a key that is no word", key)
            full = f"{path}{key.value}"
            if key.value in found:
                twice[full] = None
            lines[full] = key.start_mark.line + 1
            found[key.value] = _value(value, f"{full}.", lines, twice)
        return found
    try:
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half a character could not be written anywhere
            return _READERS[node.tag](node)
    except (KeyError, ValueError, IndexError, OverflowError):
        pass
    raise _NotPlainError(
        f"a value that cannot be read as {node.tag!r:.80}: put it in quotes if it is text", node
    )
