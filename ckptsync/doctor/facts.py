"""The facts of one node, parsed (`NodeFacts`), and how checks group nodes by a fact.

Facts come from a store, where anybody who can write may have written them.  So they are parsed once
into typed fields, in which a value of the wrong type counts as missing, and checks need no care.
Imports the standard library alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ckptsync.doctor.findings import Finding

_LONGEST = 1000  # characters of a text
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OutputDir:
    """An output directory on one node.

    ``nonce``: the random token that this node wrote beside it.  ``seen``: the tokens of all nodes
    that it saw there.  ``server``: the file system's type (``nfs4``) if a server has the files.
    """

    nonce: str = ""
    seen: tuple[str, ...] = ()
    server: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of one node, under the names that `ckptsync.doctor.probe.gather` uses.

    ``within``: ``ray`` for a process of Ray's, whose variables do not say how many ranks, nodes and
    GPUs there are; ``run`` for a training that has begun.  ``clock``: seconds by which the node's
    clock is ahead of the store's, None if not measured.  ``gpus``: None if unknown.  ``training``:
    the values in the training's own file, by the keys in `ckptsync.doctor.training_facts`.
    """

    name: str
    within: str = ""
    host: str = ""
    machine: str = ""
    boot: str = ""
    network: str = ""
    user: str = ""
    uid: int | None = None
    cpus: int = 0
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    builds: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] | None = None
    driver: str = ""
    driver_cuda: str = ""
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    master: tuple[str, ...] = ()
    is_master: bool | None = None
    port: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    output_dirs: Mapping[str, OutputDir] = field(default_factory=dict)
    model: str = ""
    digest: str = ""
    training: Mapping[str, str] = field(default_factory=dict)
    clock: float | None = None

    def variable(self, name: str) -> str:
        """Return a variable of the environment; "" if it is not set."""
        return self.variables.get(name, "")

    def is_on(self, switch: str) -> bool:
        """Return whether a variable of the environment is a switch that is on."""
        return is_true(self.variable(switch))


def read_facts(raw: Mapping[str, Any]) -> NodeFacts:
    """Return a node's facts; a missing value, or one of a wrong type, is the field's default.

    The name is ``node``, else ``host``, else "?".
    """
    fields = raw if isinstance(raw, Mapping) else {}
    name = _convert(str, fields.get("node")) or _convert(str, fields.get("host")) or "?"
    return _convert_fields(NodeFacts, {**fields, "name": name})


def _convert_fields(kind: type[_T], raw: object) -> _T:
    """Return a dataclass whose fields are read from a mapping by `_convert`."""
    fields = raw if isinstance(raw, Mapping) else {}
    return kind(**{name: _convert(type_, fields.get(name)) for name, type_ in _types(kind).items()})


_types: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def _convert(kind: Any, raw: object) -> Any:
    """Convert ``raw`` to the type ``kind``; a value of another type becomes None, 0, "" or empty.

    Texts are cut at `_LONGEST` characters.  Items of a wrong type are left out of sequences and of
    mappings to int; other mappings keep them, converted.
    """
    if kind is str:
        return raw[:_LONGEST] if isinstance(raw, str) else ""
    if kind is int:
        return _convert(int | None, raw) or 0
    if kind == int | None:
        is_whole = isinstance(raw, int) and not isinstance(raw, bool)
        return raw if is_whole and -(2**63) <= raw < 2**63 else None  # type: ignore[operator]
    if kind == float | None:
        return read_number(raw)
    if kind == bool | None:
        return raw if isinstance(raw, bool) else None
    if kind is OutputDir:
        return _convert_fields(OutputDir, raw)
    if get_origin(kind) is Mapping:
        _, value = get_args(kind)
        fields = raw if isinstance(raw, Mapping) else {}
        pairs = ((key, item) for key, item in fields.items() if isinstance(key, str))
        if value is int:  # what is no number is not 0
            pairs = ((key, item) for key, item in pairs if _convert(int | None, item) is not None)
        return {key: _convert(value, item) for key, item in pairs}
    if isinstance(raw, (list, tuple)):
        return tuple(_convert(str, item) for item in raw if isinstance(item, str))
    return None if NoneType in get_args(kind) else ()


def read_number(raw: object) -> float | None:
    """Return a number that is finite and small enough for any clock; None for anything else."""
    is_number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
    return float(raw) if is_number and -1e19 < raw < 1e19 else None  # type: ignore[operator,arg-type]


def is_true(text: str) -> bool:
    """Return whether a switch is on, as YAML, Python and the environment write it."""
    return text.strip().lower() in ("true", "1", "yes", "y", "on")


def share_a_network(nodes: Sequence[NodeFacts]) -> bool:
    """Return whether all nodes run on one machine with one network namespace.

    If so, names, paths and loopback are the same for all.  False if a node's machine or namespace
    is not known, or there is no node.
    """
    machines = {(node.boot, node.network) for node in nodes}
    return len(machines) == 1 and all(machines.pop())


def group_by(
    nodes: Iterable[NodeFacts], value: Callable[[NodeFacts], str]
) -> dict[str, tuple[str, ...]]:
    """Return, by value, the sorted names of the nodes with it; "" is a value, too."""
    names: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda n: n.name):
        names[value(node)] = (*names.get(value(node), ()), node.name)
    return names


def names_of(groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names in groups of nodes."""
    return tuple(name for names in groups.values() for name in names)


def show_groups(groups: Mapping[str, tuple[str, ...]]) -> str:
    """Return ``2.6.0 on n0, n1; 2.7.1 on n2``; of many nodes the first three, and how many more."""

    def some(names: tuple[str, ...]) -> str:
        """Return the first three names, and how many more there are."""
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return "; ".join(f"{value or 'none'} on {some(names)}" for value, names in groups.items())


def find_difference(
    level: Callable[..., Finding],
    kind: str,
    subject: str,
    nodes: Iterable[NodeFacts],
    value: Callable[[NodeFacts], str],
    *,
    why: str,
    hint: str,
) -> Iterator[Finding]:
    """Yield one finding, on all ``nodes``, if ``value`` differs; "" is a value, shown as none."""
    groups = group_by(nodes, value)
    if len(groups) > 1:
        yield level(kind, subject, show_groups(groups), why=why, hint=hint, nodes=names_of(groups))
