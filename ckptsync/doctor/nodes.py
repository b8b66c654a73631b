"""What a node said of itself, as values.  It may come from anybody who can write to the store: what is not of its type is as if it were not said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """An output directory: our own word of chance beside it, and those that were seen there, ours among them; ``server``: nfs4 or the like, where it is one's."""

    nonce: str = ""
    seen: tuple[str, ...] = ()
    server: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """As `ckptsync.doctor.probe.gather` tells it.  ``clock``: seconds by which its clock is ahead of the store's, ``None`` where nobody measured it.

    ``within``: ``ray`` for a process of Ray's, which is not told by variables how many ranks and nodes there are, and which GPUs they have; ``run`` for one of a
    training that has begun, whose ranks have met.
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
    prefix: str = ""
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
    places: Mapping[str, Place] = field(default_factory=dict)
    model: str = ""
    digest: str = ""
    training: Mapping[str, str] = field(default_factory=dict)
    clock: float | None = None
    at: float = 0.0


def read(raw: Mapping[str, Any]) -> Node:
    """What was gathered, or published; what is missing or odd is left at its default."""
    told = _mapping(raw)
    model, master = _mapping(told.get("model")), _mapping(told.get("master"))
    texts = {
        key: _text(told.get(key))
        for key in ("within", "host", "machine", "boot", "network", "user", "python", "prefix", "driver", "driver_cuda")
    }
    return Node(
        name=_text(told.get("node")) or _text(told.get("host")) or "?",
        **texts,
        uid=_whole(told.get("uid")),
        cpus=_whole(told.get("cpus")) or 0,
        versions=_of(told.get("versions"), _text),
        builds=_of(told.get("builds"), _text),
        gpus=_texts(told.get("gpus")) if isinstance(told.get("gpus"), (list, tuple)) else None,
        overrides=_texts(told.get("overrides")),
        variables=_of(told.get("variables"), _text),
        interfaces={name: _of(about, _text) for name, about in _mapping(told.get("interfaces")).items()},
        addresses=_texts(told.get("addresses")),
        master=_texts(master.get("addresses")),
        is_master=_truth(master.get("is_here")),
        port=_text(master.get("port")),
        limits={name: n for name, value in _mapping(told.get("limits")).items() if (n := _whole(value)) is not None},
        places={path: _place(about) for path, about in _mapping(told.get("places")).items()},
        model=_text(model.get("path")),
        digest=_text(model.get("digest")),
        training=_of(told.get("training"), _text),
        clock=number(told.get("clock")),
        at=number(told.get("at")) or 0.0,
    )


def share_a_network(nodes: Sequence[Node]) -> bool:
    """Whether all are one machine with one network: then their names, paths and loopback are one machine's."""
    return len({(node.boot, node.network) for node in nodes}) == 1 and bool(nodes[0].boot and nodes[0].network)


def grouped(nodes: Iterable[Node], value: Callable[[Node], str]) -> dict[str, tuple[str, ...]]:
    """Which nodes say what, by what they say; in the order of their names."""
    found: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=lambda n: n.name):
        found[value(node)] = (*found.get(value(node), ()), node.name)
    return found


def told(groups: Mapping[str, tuple[str, ...]]) -> str:
    """``2.6.0 on n0, n1; 2.7.1 on n2``: of many nodes the first three, and how many more."""
    return "; ".join(f"{value or 'none'} on {_some(names)}" for value, names in groups.items())


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(raw: object) -> Place:
    about = _mapping(raw)
    return Place(_text(about.get("nonce")), _texts(about.get("seen")), _text(about.get("server")))


def _mapping(raw: object) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if isinstance(key, str)} if isinstance(raw, Mapping) else {}


def _of(raw: object, one: Callable[[object], str]) -> dict[str, str]:
    return {key: one(value) for key, value in _mapping(raw).items()}


def _text(raw: object) -> str:
    return raw[:1000] if isinstance(raw, str) else ""


def _texts(raw: object) -> tuple[str, ...]:
    return tuple(_text(one) for one in raw if isinstance(one, str)) if isinstance(raw, (list, tuple)) else ()


def _truth(raw: object) -> bool | None:
    return raw if isinstance(raw, bool) else None


def _whole(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and -(2**63) <= raw < 2**63 else None


def is_true(text: str) -> bool:
    """Return whether a switch is on, as YAML, Python and the environment write it."""
    return text.strip().lower() in ("true", "1", "yes", "y", "on")


def number(raw: object) -> float | None:
    """Finite, and small enough for any clock; ``None`` for what is none."""
    return float(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) and -1e19 < raw < 1e19 else None
