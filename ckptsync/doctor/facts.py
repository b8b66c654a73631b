"""What a node says of itself (`Node`), and what is found wrong (`Finding`).

`read` makes a `Node` of what `ckptsync.doctor.probe` gathered or another node published.  Anybody who can write to the store may have written that:
a value of the wrong type counts as not said.  Needs the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptsync.errors import ConfigError, StoreError

Level = Literal["fail", "warn"]
SETUP = ConfigError.exit_code  # somebody changes a configuration, a version, a variable or a right
STORAGE = StoreError.exit_code  # the store, a disk or a file system

_KIND = re.compile(r"[a-z0-9-]{1,40}")
_LONGEST_FINDING, _LONGEST_FACT = 2000, 1000  # characters of a text


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, where, why it matters, and what to do.

    ``kind`` is one of docs/doctor.md and does not change.  ``nodes``: whose fault it is, or between which nodes it is.  ``subject``: a path, a
    variable, a library.  ``exit_code``: what the command ends with if this is a failure.
    """

    level: Level
    kind: str
    nodes: tuple[str, ...]
    subject: str
    what: str
    why: str
    hint: str
    exit_code: int = SETUP

    @property
    def where(self) -> str:
        """The nodes and the subject, as people read them."""
        return ": ".join(part for part in (", ".join(self.nodes), self.subject) if part)


def fail(kind: str, nodes: str | tuple[str, ...], subject: object, what: str, *, why: str, hint: str, code: int = SETUP) -> Finding:
    """Return a failure: the training would hang, end or lose files."""
    return Finding("fail", kind, (nodes,) if isinstance(nodes, str) else nodes, str(subject), what, why, hint, code)


def warn(kind: str, nodes: str | tuple[str, ...], subject: object, what: str, *, why: str, hint: str, code: int = SETUP) -> Finding:
    """Return a warning: the training may hang, end or lose files."""
    return Finding("warn", kind, (nodes,) if isinstance(nodes, str) else nodes, str(subject), what, why, hint, code)


def read_finding(raw: object, node: str) -> Finding | None:
    """Return the finding that a node published about itself; ``None`` for anything else."""
    if not isinstance(raw, dict):
        return None
    kind, level, code = raw.get("kind"), raw.get("level"), raw.get("exit_code")
    texts = [raw.get(key) for key in ("subject", "what", "why", "hint")]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or level not in ("fail", "warn") or code not in (SETUP, STORAGE):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    subject, what, why, hint = (str(text)[:_LONGEST_FINDING] for text in texts)
    return Finding(level, kind, (node,), subject, what, why, hint, code)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each finding once, failures first, in the same order every time."""
    return tuple(sorted(set(findings), key=lambda f: (f.level, f.kind, f.nodes, f.subject, f.what)))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the greatest exit code of the failures; 0 where there are warnings alone."""
    return max((f.exit_code for f in findings if f.level == "fail"), default=0)


@dataclass(frozen=True, slots=True)
class OutputDir:
    """An output directory on one node.

    ``nonce``: the random word that this node wrote beside it.  ``seen``: the words of all nodes that lay there.  ``server``: the file system's
    type (``nfs4``) where a server has the files.
    """

    nonce: str = ""
    seen: tuple[str, ...] = ()
    server: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """The facts of one node, as `ckptsync.doctor.probe.gather` tells them.

    ``within``: ``ray`` for a process of Ray's, which no variables tell how many ranks, nodes and GPUs there are; ``run`` for a training that has begun.
    ``clock``: seconds by which the node's clock is ahead of the store's, ``None`` where nobody measured it.  ``gpus`` is ``None`` where nobody knows.
    ``training``: what the training's own file says, of the keys in `ckptsync.doctor.training`.
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


_TEXTS = ("within", "host", "machine", "boot", "network", "user", "python", "driver", "driver_cuda")


def read(raw: Mapping[str, Any]) -> Node:
    """Return a node's facts; what is missing or of the wrong type is left at its default."""
    given = _mapping(raw)
    model, master, is_here = (
        _mapping(given.get("model")),
        _mapping(given.get("master")),
        _mapping(given.get("master")).get("is_here"),
    )
    return Node(
        name=_text(given.get("node")) or _text(given.get("host")) or "?",
        **{key: _text(given.get(key)) for key in _TEXTS},
        uid=_whole(given.get("uid")),
        cpus=_whole(given.get("cpus")) or 0,
        versions=_texts_by_key(given.get("versions")),
        builds=_texts_by_key(given.get("builds")),
        gpus=_texts(given.get("gpus")) if isinstance(given.get("gpus"), (list, tuple)) else None,
        overrides=_texts(given.get("overrides")),
        variables=_texts_by_key(given.get("variables")),
        interfaces={name: _texts_by_key(about) for name, about in _mapping(given.get("interfaces")).items()},
        addresses=_texts(given.get("addresses")),
        master=_texts(master.get("addresses")),
        is_master=is_here if isinstance(is_here, bool) else None,
        port=_text(master.get("port")),
        limits={name: n for name, value in _mapping(given.get("limits")).items() if (n := _whole(value)) is not None},
        output_dirs={path: _output_dir(about) for path, about in _mapping(given.get("output_dirs")).items()},
        model=_text(model.get("path")),
        digest=_text(model.get("digest")),
        training=_texts_by_key(given.get("training")),
        clock=number(given.get("clock")),
    )


def number(raw: object) -> float | None:
    """Return a number that is finite and small enough for any clock; ``None`` for anything else."""
    return float(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) and -1e19 < raw < 1e19 else None


def is_true(text: str) -> bool:
    """Return whether a switch is on, as YAML, Python and the environment write it."""
    return text.strip().lower() in ("true", "1", "yes", "y", "on")


def share_a_network(nodes: Sequence[Node]) -> bool:
    """Return whether all nodes are one machine with one network: names, paths and loopback are the same for all of them."""
    return len({(node.boot, node.network) for node in nodes}) == 1 and bool(nodes[0].boot and nodes[0].network)


def grouped(nodes: Iterable[Node], value: Callable[[Node], str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes by what they say, in the order of their names."""
    found: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda n: n.name):
        found[value(node)] = (*found.get(value(node), ()), node.name)
    return found


def names_of(groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names in groups of nodes."""
    return tuple(name for names in groups.values() for name in names)


def show(groups: Mapping[str, tuple[str, ...]]) -> str:
    """Return ``2.6.0 on n0, n1; 2.7.1 on n2``; of many nodes the first three, and how many more."""

    def some(names: tuple[str, ...]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return "; ".join(f"{value or 'none'} on {some(names)}" for value, names in groups.items())


def _output_dir(raw: object) -> OutputDir:
    about = _mapping(raw)
    return OutputDir(_text(about.get("nonce")), _texts(about.get("seen")), _text(about.get("server")))


def _mapping(raw: object) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if isinstance(key, str)} if isinstance(raw, Mapping) else {}


def _text(raw: object) -> str:
    return raw[:_LONGEST_FACT] if isinstance(raw, str) else ""


def _texts(raw: object) -> tuple[str, ...]:
    return tuple(_text(one) for one in raw if isinstance(one, str)) if isinstance(raw, (list, tuple)) else ()


def _texts_by_key(raw: object) -> dict[str, str]:
    return {key: _text(value) for key, value in _mapping(raw).items()}


def _whole(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and -(2**63) <= raw < 2**63 else None
