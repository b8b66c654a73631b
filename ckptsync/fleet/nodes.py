"""Each node as its last heartbeat has it.  Pure; times are seconds on the store's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.errors import Corrupt
from ckptsync.fleet.facts import Facts, Train
from ckptsync.fleet.heartbeat import Disk, Heartbeat, Job
from ckptsync.fleet.told import Known, Told

State = Literal["alive", "silent", "stopped", "unreadable"]
STATES: tuple[State, ...] = ("alive", "silent", "stopped", "unreadable")
SILENT = 4  # periods without a beat


@dataclass(frozen=True, slots=True)
class Node:
    """``name`` is the node's id, and ``~head`` where a head without a worker speaks.  ``beat``: when it did last, ``age`` seconds ago.

    What follows is as it said then: ``oldest``: seconds for which the first of the ``queue`` had waited, ``rate``: bytes a second over a minute,
    ``sent_bytes``: since its start.  ``verifies``: seconds within which it reads every byte of the store again, 0 if it does not.
    ``lacks``: record of damage → what of it this node cannot send again.
    ``clock_offset``: its clock minus the store's, in seconds, ``None`` where nobody measured it.  ``trains``: run → its newest training there.
    """

    name: str
    node: str
    roles: tuple[str, ...]
    state: State
    beat: float
    age: float
    version: str = ""
    host: str = ""
    queue: tuple[str, ...] = ()
    oldest: float = 0.0
    rate: float = 0.0
    sent_bytes: int = 0
    jobs: tuple[Job, ...] = ()
    verifies: float = 0.0
    disk: tuple[Disk, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    clock_offset: float | None = None
    trains: Mapping[str, Train] = field(default_factory=dict)


def nodes(told: Told, now: float) -> tuple[Node, ...]:
    """Every node that has ever beaten, by name."""
    facts, broken = told.facts, told.unreadable_facts
    return tuple(node(known, facts.get(known.name, broken.get(known.name)), now) for known in told.hearts)


def node(known: Known, said: Facts | Corrupt | None, now: float) -> Node:
    """One node, from its heartbeat and, where there are, its facts; those that cannot be read are a note."""
    facts = said if isinstance(said, Facts) else None
    heart, beat = known.said, known.entry.mtime
    age = max(0.0, now - beat)
    if not isinstance(heart, Heartbeat):
        return Node(known.name, known.name, (), "unreadable", beat, age, errors=(str(heart),) if isinstance(heart, Corrupt) else ())
    offset = facts.clock_offset if facts else None
    return Node(
        name=known.name,
        node=heart.node,
        roles=heart.roles,
        state="stopped" if heart.stopped else "silent" if age > SILENT * heart.period else "alive",
        beat=beat,
        age=age,
        version=heart.version,
        host=facts.host if facts else "",
        clock_offset=None if offset is None else offset / 1e9,
        trains=facts.trains if facts else {},
        notes=(*heart.notes, str(said)) if isinstance(said, Corrupt) else heart.notes,
        **{key: getattr(heart, key) for key in _TOLD},
    )


_TOLD = ("queue", "oldest", "rate", "sent_bytes", "jobs", "verifies", "disk", "watch", "errors", "lacks")
