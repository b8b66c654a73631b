"""Read YAML as plain values, with the line of each key, so that a problem can name its line.

PyYAML's parser makes nodes, which know their lines; this module reads values from the nodes.  A
configuration has text, numbers, true and false, lists and mappings.  Tags and aliases (300 bytes of
them make gigabytes) are refused, and dates are text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from ckptsync.errors import ConfigError

LIMIT = 256 << 10
"""The most bytes of a file: a hundred long configurations, and some seconds for PyYAML."""
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
    """The plain values of a file, and where its keys are.

    ``lines``: the line of each key by its path (``worker.quiet``).  ``twice``: the paths of keys
    that a mapping has twice; the last value counts.
    """

    values: object = None
    lines: dict[str, int] = field(default_factory=dict)
    twice: dict[str, None] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """Return the values of a YAML document, with the line of each key; None for an empty one.

    Every key is a string as it is written, so that ``on`` is a word.  Of a repeated key the last
    value counts, and ``twice`` names it.  ``name``: the file in messages.  Raises ConfigError, with
    the line if it is known, for a text that is no YAML, longer than `LIMIT`, or has more than plain
    values or one document.
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
        position = f"{name}:{e.problem_mark.line + 1}" if e.problem_mark else name
        raise ConfigError(f"{position}: not YAML: {e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # also for an invalid character
        raise ConfigError(f"{name}: not YAML: {' '.join(str(e).split())}") from e


class _NotPlainError(Exception):
    """A part of a file that is no plain value, with its line."""

    def __init__(self, text: str, part: yaml.Event | yaml.Node) -> None:
        """Keep the line of the part, counted from 1; 1 if it is not known."""
        super().__init__(text)
        self.line = part.start_mark.line + 1 if part.start_mark else 1


class _Loader(yaml.SafeLoader):
    """Makes nodes of plain YAML only; no value is constructed from them."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; raise _NotPlainError for an alias, or beyond `_DEEPEST` levels."""
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
    """Return a node's value; add the keys in it to ``lines``, and repeated ones to ``twice``.

    ``path`` comes before the keys' names.  Raise _NotPlainError for a tag, a key that is no
    printable text, or a value that cannot be read or encoded.
    """
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value(item, f"{path}[].", lines, twice) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                raise _NotPlainError("a key that is no word", key)
            full = f"{path}{key.value}"
            if key.value in mapping:
                twice[full] = None
            lines[full] = key.start_mark.line + 1
            mapping[key.value] = _value(value, f"{full}.", lines, twice)
        return mapping
    try:
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half a character could not be written anywhere
            return _READERS[node.tag](node)
    except (KeyError, ValueError, IndexError, OverflowError):
        pass
    raise _NotPlainError(
        f"a value that cannot be read as {node.tag!r:.80}: put it in quotes if it is text", node
    )
