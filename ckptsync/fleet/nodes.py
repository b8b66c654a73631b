"""The nodes of a store: their heartbeats and facts, read again where they have changed (`told`), and each node by its last heartbeat (`nodes`).

Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.errors import Corrupt, NotFound
from ckptsync.fleet import facts, heartbeat
from ckptsync.fleet.facts import Facts, Train
from ckptsync.fleet.heartbeat import FACTS, LIMIT, Disk, Heartbeat, Job
from ckptsync.records.names import OURS
from ckptsync.stores.contract import Entry, Store, read_all

State = Literal["alive", "silent", "stopped", "unreadable"]
STATES: tuple[State, ...] = ("alive", "silent", "stopped", "unreadable")
SILENT = 4  # periods without a beat


@dataclass(frozen=True, slots=True)
class Known:
    """A file of ``.ckptsync/nodes``: its entry, and what it says."""

    entry: Entry
    said: Heartbeat | Facts | Corrupt

    @property
    def name(self) -> str:
        """Return the node's id, and ``~head`` where a head without a worker speaks."""
        return self.entry.name.rpartition("/")[2].removesuffix(FACTS).removesuffix(".json")


@dataclass(frozen=True, slots=True)
class Told:
    """What all nodes say, by the names of their files: heartbeats and facts.  `told` takes it again."""

    files: Mapping[str, Known] = field(default_factory=dict)

    @property
    def hearts(self) -> tuple[Known, ...]:
        """Return all heartbeats, by name; those that cannot be read are their errors."""
        return tuple(known for name, known in sorted(self.files.items()) if not name.endswith(FACTS))

    @property
    def facts(self) -> dict[str, Facts]:
        """Return the facts that can be read, by `Known.name`."""
        return {known.name: known.said for known in self.files.values() if isinstance(known.said, Facts)}

    @property
    def unreadable_facts(self) -> dict[str, Corrupt]:
        """Return the errors of facts that cannot be read, by `Known.name`."""
        return {
            known.name: known.said for name, known in self.files.items() if name.endswith(FACTS) and isinstance(known.said, Corrupt)
        }

    def now(self, machine: str, clock: float) -> float:
        """Return the time on the store's clock, from this machine's ``clock``; never before the newest heartbeat."""
        known = [(k.entry, k.said) for k in self.hearts if isinstance(k.said, Heartbeat)]
        return max(heartbeat.store_now(known, machine, clock), max((entry.mtime for entry, _ in known), default=0.0))


Each = Callable[[Callable[[Entry], Known | None], Iterable[Entry]], Iterable[Known | None]]
"""As `map`; a caller with threads gives its pool's, since a distant store is waited for."""


def told(store: Store, before: Told | None = None, each: Each = map) -> Told:
    """Return what nodes say now; raises StoreError.  A file of the same size and time is not read again."""
    last = before.files if before else {}
    entries = [entry for entry in store.names(f"{OURS}/nodes/") if entry.name.endswith(".json")]
    same = {e.name: last[e.name] for e in entries if e.name in last and last[e.name].entry == e}
    read = each(lambda entry: _read(store, entry), [e for e in entries if e.name not in same])
    return Told(same | {known.entry.name: known for known in read if known})


def _read(store: Store, entry: Entry) -> Known | None:
    decode = facts.decode if entry.name.endswith(FACTS) else heartbeat.decode
    try:
        return Known(entry, decode(entry.name, read_all(store, entry.name, LIMIT)))
    except Corrupt as e:
        return Known(entry, e)
    except NotFound:
        return None  # gone since it was listed


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
    """Return every node that has ever beaten, by name."""
    known_facts, broken = told.facts, told.unreadable_facts
    return tuple(node(known, known_facts.get(known.name, broken.get(known.name)), now) for known in told.hearts)


def node(known: Known, said: Facts | Corrupt | None, now: float) -> Node:
    """Return one node, from its heartbeat and, where there are, its facts; those that cannot be read are a note."""
    known_facts = said if isinstance(said, Facts) else None
    heart, beat = known.said, known.entry.mtime
    age = max(0.0, now - beat)
    if not isinstance(heart, Heartbeat):
        return Node(known.name, known.name, (), "unreadable", beat, age, errors=(str(heart),) if isinstance(heart, Corrupt) else ())
    offset = known_facts.clock_offset if known_facts else None
    return Node(
        name=known.name,
        node=heart.node,
        roles=heart.roles,
        state="stopped" if heart.stopped else "silent" if age > SILENT * heart.period else "alive",
        beat=beat,
        age=age,
        version=heart.version,
        host=known_facts.host if known_facts else "",
        clock_offset=None if offset is None else offset / 1e9,
        trains=known_facts.trains if known_facts else {},
        notes=(*heart.notes, str(said)) if isinstance(said, Corrupt) else heart.notes,
        **{key: getattr(heart, key) for key in _TOLD},
    )


_TOLD = ("queue", "oldest", "rate", "sent_bytes", "jobs", "verifies", "disk", "watch", "errors", "lacks")
