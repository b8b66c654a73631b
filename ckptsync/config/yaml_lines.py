"""YAML as plain values, and the line of each key: so that a problem can say where it is."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ckptsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Document:
    """``values``: what the file says.  ``lines``: the line of each key by its path (``worker.quiet``).  ``twice``: keys given twice."""

    values: object
    lines: dict[str, int]
    twice: tuple[str, ...]


def parse(text: str, name: str) -> Document:
    """Raises ConfigError where ``text`` is not YAML at all."""
    try:
        values = yaml.load(text, Loader=_SafeWords)  # noqa: S506 - a SafeLoader
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        where = f"{name}:{e.problem_mark.line + 1}" if e.problem_mark else name
        raise ConfigError(f"{where}: not YAML: {e.problem or e.context}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{name}: not YAML: {e}") from e
    keys = list(_keys(root, "")) if root is not None else []
    paths = [path for path, _ in keys]
    twice = tuple(dict.fromkeys(path for i, path in enumerate(paths) if path in paths[:i]))
    return Document(values, dict(keys), twice)


class _SafeWords(yaml.SafeLoader):
    """Keys are words: YAML 1.1 would make `true` of the key ``on``."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the library's
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _keys(node: yaml.Node, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if depth > 3:  # no setting lies deeper, and an alias may hold itself
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _keys(value, f"{path}.", depth + 1)
