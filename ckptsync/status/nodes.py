"""The nodes of a store, each by its last heartbeat.

A node is alive if the store dates its heartbeat recently, so no node's clock matters. `read_nodes`
reads the files that changed since the last call; `list_nodes` computes the nodes from them. Times
are seconds on the store's clock.
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
    """A file of ``.ckptsync/nodes``: its entry, and its content, or why it cannot be read."""

    entry: Entry
    content: Heartbeat | Facts | Corrupt

    @property
    def name(self) -> str:
        """Return the node's id, with ``~head`` if a head without a worker wrote it."""
        return self.entry.name.rpartition("/")[2].removesuffix(FACTS).removesuffix(".json")


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The files of all nodes, by name."""

    files: Mapping[str, NodeFile] = field(default_factory=dict)

    @property
    def hearts(self) -> tuple[NodeFile, ...]:
        """Return all heartbeats, sorted by the names of their files."""
        entries = sorted(self.files.items())
        return tuple(file for name, file in entries if not name.endswith(FACTS))

    @property
    def facts(self) -> dict[str, Facts | Corrupt]:
        """Return all facts, or why they cannot be read, by `NodeFile.name`."""
        facts_files = (file for name, file in sorted(self.files.items()) if name.endswith(FACTS))
        return {k.name: k.content for k in facts_files if not isinstance(k.content, Heartbeat)}

    def now(self, machine: str, clock: float) -> float:
        """Return the time on the store's clock, never before the newest heartbeat.

        That is ``clock`` (of this machine), corrected by the heartbeats of this ``machine``, which
        hold both clocks' times; of several the least correction. Without one it is not corrected.
        """
        files = [(k.content, k.entry.mtime) for k in self.hearts]
        heartbeats = [(heart, mtime) for heart, mtime in files if isinstance(heart, Heartbeat)]
        own_times = [
            (h.written, mtime) for h, mtime in heartbeats if machine and h.machine == machine
        ]
        offset = min(
            (written - mtime for written, mtime in own_times if written), key=abs, default=0.0
        )
        return max(clock - offset, *(mtime for _, mtime in heartbeats), 0.0)


Each = Callable[[Callable[[Entry], NodeFile | None], Iterable[Entry]], Iterable[NodeFile | None]]
"""As `map`; a caller with threads passes its pool's, since a distant store answers late."""


def read_nodes(
    store: Store, before: NodeFiles | None = None, each: Each = map, *, with_facts: bool = True
) -> NodeFiles:
    """Return the files of all nodes; read only those that changed since ``before``.

    ``each``: `map`, or a pool's, whose threads then read. Without ``with_facts`` facts are left
    out. A file that cannot be decoded is returned with its error. Raises StoreError.
    """
    last = before.files if before else {}
    entries = [
        e
        for e in store.names(f"{RECORDS}/nodes/")
        if e.name.endswith(".json") and (with_facts or not e.name.endswith(FACTS))
    ]
    same = {e.name: last[e.name] for e in entries if e.name in last and last[e.name].entry == e}

    def read(entry: Entry) -> NodeFile | None:
        """Read one file; return None if it was deleted."""
        try:
            return NodeFile(entry, decode(entry.name, read_all(store, entry.name, LIMIT)))
        except Corrupt as e:
            return NodeFile(entry, without_frames(e))
        except NotFound:
            return None  # deleted since it was listed

    new = each(read, [e for e in entries if e.name not in same])
    return NodeFiles(same | {file.entry.name: file for file in new if file})


@dataclass(frozen=True, slots=True)
class Node(CurrentWork):
    """A node: its state, and its work at the time of its last heartbeat.

    ``name``: the node's id, with ``~head`` for a head without a worker. ``beat``: when it wrote its
    last heartbeat; ``age``: seconds since then. ``clock_offset``: its clock minus the store's, in
    seconds, None if not measured. ``trains``: run → its newest training.
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
        """Return the seconds for which its oldest upload has waited; 0 if there is none."""
        began = (p.since for p in self.running if p.kind == "upload")
        return max(0.0, self.beat - min(began, default=self.beat))


def list_nodes(files: NodeFiles, now: float) -> tuple[Node, ...]:
    """Return every node that has a heartbeat in the store, by name."""
    all_facts = files.facts
    return tuple(_node(file, all_facts.get(file.name), now) for file in files.hearts)


def _node(file: NodeFile, facts: Facts | Corrupt | None, now: float) -> Node:
    """Return one node, from its heartbeat and its facts; a note says if those cannot be read.

    It is alive up to `SILENT` periods after its beat. Its work's times become the store's.
    """
    heart, beat = file.content, file.entry.mtime
    age = max(0.0, now - beat)
    if not isinstance(heart, Heartbeat):
        return Node(file.name, file.name, (), "unreadable", beat, age, errors=(str(heart),))
    state: State = "silent" if age > SILENT * heart.period else "alive"
    known_facts = facts if isinstance(facts, Facts) else None
    offset = known_facts.clock_offset if known_facts else None
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
        name=file.name,
        node=heart.node,
        roles=heart.roles,
        state="stopped" if heart.stopped else state,
        beat=beat,
        age=age,
        version=heart.version,
        host=known_facts.host if known_facts else "",
        clock_offset=None if offset is None else offset / 1e9,
        trains=known_facts.trains if known_facts else {},
        **work,
    )
