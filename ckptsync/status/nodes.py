"""The nodes of a store, each by its last heartbeat.

Their files are read again where they have changed.

Times are seconds on the store's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from ckptsync.errors import Corrupt, NotFound, without_frames
from ckptsync.safe_names import RECORDS
from ckptsync.status.heartbeat import (
    FACTS,
    LIMIT,
    CurrentWork,
    Facts,
    Heartbeat,
    Train,
    decode,
)
from ckptsync.stores.contract import Entry, Store, read_all

State = Literal["alive", "silent", "stopped", "unreadable"]
STATES: tuple[State, ...] = get_args(State)
SILENT = 4  # periods without a beat


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file of ``.ckptsync/nodes``: its entry, and what is in it, or why it cannot be read."""

    entry: Entry
    content: Heartbeat | Facts | Corrupt

    @property
    def name(self) -> str:
        """Return the node's id, with ``~head`` where a head without a worker wrote it."""
        return self.entry.name.rpartition("/")[2].removesuffix(FACTS).removesuffix(".json")


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The files of all nodes, by name."""

    files: Mapping[str, NodeFile] = field(default_factory=dict)

    @property
    def hearts(self) -> tuple[NodeFile, ...]:
        """Return all heartbeats, sorted by the names of their files."""
        found = sorted(self.files.items())
        return tuple(known for name, known in found if not name.endswith(FACTS))

    @property
    def facts(self) -> dict[str, Facts | Corrupt]:
        """Return all facts, or why they cannot be read, by `NodeFile.name`."""
        found = (known for name, known in sorted(self.files.items()) if name.endswith(FACTS))
        return {k.name: k.content for k in found if not isinstance(k.content, Heartbeat)}

    def now(self, machine: str, clock: float) -> float:
        """Return the time on the store's clock, never before the newest beat.

        That is ``clock``, corrected by a heartbeat of this machine.
        """
        files = [(k.content, k.entry.mtime) for k in self.hearts]
        known = [(heart, at) for heart, at in files if isinstance(heart, Heartbeat)]
        mine = [(h.written, at) for h, at in known if machine and h.machine == machine]
        offset = min((written - at for written, at in mine if written), key=abs, default=0.0)
        return max(clock - offset, *(at for _, at in known), 0.0)


Each = Callable[[Callable[[Entry], NodeFile | None], Iterable[Entry]], Iterable[NodeFile | None]]
"""As `map`; a caller with threads gives its pool's, since a distant store is waited for."""


def read_nodes(
    store: Store, before: NodeFiles | None = None, each: Each = map, *, with_facts: bool = True
) -> NodeFiles:
    """Return the files of all nodes; read what changed since ``before``.  Raises StoreError."""
    last = before.files if before else {}
    entries = [
        e
        for e in store.names(f"{RECORDS}/nodes/")
        if e.name.endswith(".json") and (with_facts or not e.name.endswith(FACTS))
    ]
    same = {e.name: last[e.name] for e in entries if e.name in last and last[e.name].entry == e}

    def read(entry: Entry) -> NodeFile | None:
        try:
            return NodeFile(entry, decode(entry.name, read_all(store, entry.name, LIMIT)))
        except Corrupt as e:
            return NodeFile(entry, without_frames(e))
        except NotFound:
            return None  # deleted since it was listed

    new = each(read, [e for e in entries if e.name not in same])
    return NodeFiles(same | {known.entry.name: known for known in new if known})


@dataclass(frozen=True, slots=True)
class Node(CurrentWork):
    """``name`` is the node's id, with ``~head`` for a head without a worker.

    ``beat``: when it beat last.  ``age``: seconds since then; its work was so then, and the times
    of it are on the store's clock.
    ``clock_offset``: its clock minus the store's, in seconds, None where it was not measured.
    ``trains``: run → its newest training.
    """

    name: str
    node: str
    roles: tuple[str, ...]
    state: State
    beat: float
    age: float
    version: str = ""
    host: str = ""
    clock_offset: float | None = None
    trains: Mapping[str, Train] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        """Return for how many seconds the first of its uploads has waited; 0 if there is none."""
        began = (p.since for p in self.running if p.kind == "upload")
        return max(0.0, self.beat - min(began, default=self.beat))


def list_nodes(files: NodeFiles, now: float) -> tuple[Node, ...]:
    """Return every node that has ever beaten, by name."""
    all_facts = files.facts
    return tuple(_node(known, all_facts.get(known.name), now) for known in files.hearts)


def _node(known: NodeFile, facts: Facts | Corrupt | None, now: float) -> Node:
    """Return one node, from its heartbeat and its facts; a note says if those cannot be read."""
    heart, beat = known.content, known.entry.mtime
    age = max(0.0, now - beat)
    if not isinstance(heart, Heartbeat):
        return Node(known.name, known.name, (), "unreadable", beat, age, errors=(str(heart),))
    state: State = "silent" if age > SILENT * heart.period else "alive"
    found = facts if isinstance(facts, Facts) else None
    offset = found.clock_offset if found else None
    work = {each.name: getattr(heart, each.name) for each in fields(CurrentWork)}
    if isinstance(facts, Corrupt):
        work["notes"] = (*heart.notes, str(facts))
    # from the node's clock to the store's
    ahead = heart.written - beat if heart.written else 0.0
    work["running"] = tuple(
        replace(p, since=p.since - ahead, until=None if p.until is None else p.until - ahead)
        for p in heart.running
    )
    return Node(
        name=known.name,
        node=heart.node,
        roles=heart.roles,
        state="stopped" if heart.stopped else state,
        beat=beat,
        age=age,
        version=heart.version,
        host=found.host if found else "",
        clock_offset=None if offset is None else offset / 1e9,
        trains=found.trains if found else {},
        **work,
    )
