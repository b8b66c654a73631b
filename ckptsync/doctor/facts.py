"""What a node says of itself (`NodeFacts`), and how checks group nodes by what they say.

Anybody who can write to the store may have written the facts that doctor reads there: a value of
the wrong type counts as not said.  Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ckptsync.doctor.findings import Finding

_LONGEST = 1000  # characters of a text
_T = TypeVar("_T")


def _text(raw: object) -> str:
    return raw[:_LONGEST] if isinstance(raw, str) else ""


def _texts(raw: object) -> tuple[str, ...]:
    listed = raw if isinstance(raw, (list, tuple)) else ()
    return tuple(_text(one) for one in listed if isinstance(one, str))


def _texts_or_none(raw: object) -> tuple[str, ...] | None:
    return _texts(raw) if isinstance(raw, (list, tuple)) else None


def _whole(raw: object) -> int | None:
    is_whole = isinstance(raw, int) and not isinstance(raw, bool)
    return raw if is_whole and -(2**63) <= raw < 2**63 else None  # type: ignore[operator,return-value]


def _flag(raw: object) -> bool | None:
    return raw if isinstance(raw, bool) else None


def read_number(raw: object) -> float | None:
    """Return a number that is finite and small enough for any clock; ``None`` for anything else."""
    is_number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
    return float(raw) if is_number and -1e19 < raw < 1e19 else None  # type: ignore[operator,arg-type]


def _mapping_of(read: Callable[[object], _T]) -> Callable[[object], Mapping[str, _T]]:
    def read_mapping(raw: object) -> dict[str, _T]:
        pairs = raw.items() if isinstance(raw, Mapping) else ()
        return {key: read(value) for key, value in pairs if isinstance(key, str)}

    return read_mapping


def _count(raw: object) -> int:
    return _whole(raw) or 0


def _counts(raw: object) -> Mapping[str, int]:
    read = _mapping_of(_whole)(raw)
    return {name: value for name, value in read.items() if value is not None}


def _fact(read: Callable[[object], _T]) -> _T:
    """Return a field that ``read`` makes of what was said; of ``None`` it makes the default."""
    made: _T = field(default_factory=lambda: read(None), metadata={"read": read})
    return made


def _read_fields(kind: type[_T], raw: object) -> dict[str, Any]:
    said = raw if isinstance(raw, Mapping) else {}
    known = [one for one in fields(kind) if "read" in one.metadata]  # type: ignore[arg-type]
    return {one.name: one.metadata["read"](said.get(one.name)) for one in known}


@dataclass(frozen=True, slots=True)
class OutputDir:
    """An output directory on one node.

    ``nonce``: the random token that this node wrote beside it.  ``seen``: the tokens of all nodes
    that lay there.  ``server``: the file system's type (``nfs4``) where a server has the files.
    """

    nonce: str = _fact(_text)
    seen: tuple[str, ...] = _fact(_texts)
    server: str = _fact(_text)


def _output_dir(raw: object) -> OutputDir:
    return OutputDir(**_read_fields(OutputDir, raw))


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of one node, under the names that `ckptsync.doctor.probe.gather` gives them.

    ``within``: ``ray`` for a process of Ray's, which no variables tell how many ranks, nodes and
    GPUs there are; ``run`` for a training that has begun.  ``clock``: seconds by which the node's
    clock is ahead of the store's, ``None`` where nobody measured it.  ``gpus`` is ``None`` where
    nobody knows.  ``training``: what the training's own file says, of the keys in
    `ckptsync.doctor.training`.
    """

    name: str
    within: str = _fact(_text)
    host: str = _fact(_text)
    machine: str = _fact(_text)
    boot: str = _fact(_text)
    network: str = _fact(_text)
    user: str = _fact(_text)
    uid: int | None = _fact(_whole)
    cpus: int = _fact(_count)
    python: str = _fact(_text)
    versions: Mapping[str, str] = _fact(_mapping_of(_text))
    builds: Mapping[str, str] = _fact(_mapping_of(_text))
    gpus: tuple[str, ...] | None = _fact(_texts_or_none)
    driver: str = _fact(_text)
    driver_cuda: str = _fact(_text)
    overrides: tuple[str, ...] = _fact(_texts)
    variables: Mapping[str, str] = _fact(_mapping_of(_text))
    interfaces: Mapping[str, Mapping[str, str]] = _fact(_mapping_of(_mapping_of(_text)))
    addresses: tuple[str, ...] = _fact(_texts)
    master: tuple[str, ...] = _fact(_texts)
    is_master: bool | None = _fact(_flag)
    port: str = _fact(_text)
    limits: Mapping[str, int] = _fact(_counts)
    output_dirs: Mapping[str, OutputDir] = _fact(_mapping_of(_output_dir))
    model: str = _fact(_text)
    digest: str = _fact(_text)
    training: Mapping[str, str] = _fact(_mapping_of(_text))
    clock: float | None = _fact(read_number)

    def variable(self, name: str) -> str:
        """Return a variable of the environment; empty where it is not set."""
        return self.variables.get(name, "")

    def is_on(self, switch: str) -> bool:
        """Return whether a variable of the environment switches something on."""
        return is_true(self.variable(switch))


def read_facts(raw: Mapping[str, Any]) -> NodeFacts:
    """Return a node's facts; what is missing or of the wrong type is left at its default."""
    said = raw if isinstance(raw, Mapping) else {}
    name = _text(said.get("node")) or _text(said.get("host")) or "?"
    return NodeFacts(name, **_read_fields(NodeFacts, said))


def is_true(text: str) -> bool:
    """Return whether a switch is on, as YAML, Python and the environment write it."""
    return text.strip().lower() in ("true", "1", "yes", "y", "on")


def share_a_network(nodes: Sequence[NodeFacts]) -> bool:
    """Return whether all nodes are one machine with one network.

    Names, paths and loopback are the same for all of them then.
    """
    machines = {(node.boot, node.network) for node in nodes}
    return len(machines) == 1 and all(machines.pop())


def group_by(
    nodes: Iterable[NodeFacts], value: Callable[[NodeFacts], str]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes by what they say, in the order of their names."""
    found: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda n: n.name):
        found[value(node)] = (*found.get(value(node), ()), node.name)
    return found


def names_of(groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names in groups of nodes."""
    return tuple(name for names in groups.values() for name in names)


def show_groups(groups: Mapping[str, tuple[str, ...]]) -> str:
    """Return ``2.6.0 on n0, n1; 2.7.1 on n2``; of many nodes the first three, and how many more."""

    def some(names: tuple[str, ...]) -> str:
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
    """Find that nodes do not all say the same; ``level`` is `fail` or `warn`."""
    groups = group_by(nodes, value)
    if len(groups) > 1:
        yield level(kind, subject, show_groups(groups), why=why, hint=hint, nodes=names_of(groups))
