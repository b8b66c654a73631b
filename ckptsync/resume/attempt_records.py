"""The records of an attempt in a store: what each node could begin with, who is ready, the end.

Nodes of a training meet only in the store.  There each node writes records that no other node
changes, and the first one to see the end of the attempt decides it for all by a single record.

In .ckptsync/resume/<run>/<attempt>/:

    <node>.json         what this node could begin with, when it joined
    <node>.ready.json   this node has what it needs
    <node>.getting      this node downloads; written over as it goes on
    ~end.json           how the attempt ended: all are ready, or why it failed

Each but ``getting`` is created once and never changed, so a node that is started again in the same
attempt gets the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ckptsync.errors import (
    CkptsyncError,
    ConfigError,
    Corrupt,
    Exists,
    Incomplete,
    NotFound,
    StoreError,
    Unsupported,
)
from ckptsync.records.store_paths import checked_node, resume_prefix
from ckptsync.resume.attempt import Attempt
from ckptsync.resume.choose import FORMAT, NodeRecord
from ckptsync.stores.contract import Entry, Store, read_all
from ckptsync.typed_json import SHORT_RECORD, Decoder, FormatNumber, format_number

T = TypeVar("T")
ATTEMPTS = 20
"""The number of attempts of a run whose records are kept: its newest ones."""
_END = "~end.json"  # no node's id holds a ~
_READY, _GETTING, _JSON = ".ready.json", ".getting", ".json"
# seconds in which another writer may replace a record, in a store without exclusive creation
_OVERWRITTEN = 2.0
_ANEW = "begin the training again under another --attempt"
_CLASSES: dict[int, type[CkptsyncError]] = {
    each.exit_code: each for each in (ConfigError, Incomplete, StoreError, Unsupported, Corrupt)
}


@dataclass(frozen=True, slots=True)
class Ready:
    """The record that a node has what it needs to begin.

    ``aside``: the paths below its output directory that it moves aside, each with the id of the
    save there (`WholeSave.id`), so that a save that the training writes there later stays.
    """

    node: str
    aside: tuple[tuple[str, str], ...] = ()
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended for all of its nodes, written by ``node``, the first to see it.

    ``error``, ``hint`` and ``exit_code`` say why no node begins; ``error`` is empty if all begin,
    with ``checkpoint``.
    """

    node: str
    error: str = ""
    hint: str = ""
    exit_code: int = 0
    checkpoint: str = ""
    format: FormatNumber = FORMAT

    def raise_error(self) -> None:
        """Raise the error of a failed attempt, the same class on each node."""
        if self.error:
            kind = _CLASSES.get(self.exit_code, CkptsyncError)
            raise kind(self.error, hint=self.hint)


@dataclass(frozen=True, slots=True)
class AttemptState:
    """The records of an attempt by node.  ``signs`` differs after each write of a node."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    ready: dict[str, Ready] = field(default_factory=dict)
    end: End | None = None
    signs: tuple[Entry, ...] = ()


_DECODERS: dict[type, Decoder[object]] = {
    NodeRecord: Decoder(NodeRecord, "a node's record of an attempt"),
    Ready: Decoder(Ready, "a node's record of an attempt"),
    End: Decoder(End, "the end of an attempt"),
}


class AttemptRecords:
    """Reads and writes the records of one attempt.

    All methods raise StoreError, and Corrupt or Unsupported for a record that cannot be read.
    """

    def __init__(self, store: Store, run: str, attempt: Attempt) -> None:
        """Read nothing.

        Raise ConfigError for a node id that ends in ``.ready``, Corrupt for an invalid one.
        """
        self._store, self._run, self._attempt = store, run, attempt
        self._prefix = resume_prefix(run, attempt.name)
        self._cache: dict[str, object] = {}
        node = checked_node(attempt.node)
        if node.endswith(_READY.removesuffix(_JSON)):
            raise ConfigError(
                f"node {node}: an id that ends in .ready cannot take part", hint="rename the node"
            )

    def read(self) -> AttemptState:
        """Return the records of now, by one listing; a record is read only once, but for the end.

        Raises StoreError; Corrupt also if a record names another node than its own name does.
        """
        nodes: dict[str, NodeRecord] = {}
        ready: dict[str, Ready] = {}
        end: End | None = None
        entries = tuple(self._store.names(self._prefix))
        for entry in entries:
            base = entry.name.removeprefix(self._prefix)
            try:
                if base == _END:
                    end = self._read(entry.name, End)
                elif base.endswith(_READY):
                    ready[base.removesuffix(_READY)] = self._read(entry.name, Ready)
                elif base.endswith(_JSON):
                    record = self._read(entry.name, NodeRecord)
                    if record.node != base.removesuffix(_JSON):
                        raise Corrupt(f"{entry.name}: names {record.node!r:.80}", hint=_ANEW)
                    nodes[record.node] = record
            except NotFound:
                continue  # deleted since it was listed
        return AttemptState(nodes, ready, end, entries)

    def join(self, record: NodeRecord) -> None:
        """Write this node's record, unless it has one in this attempt.  Raises StoreError."""
        self._create(f"{record.node}{_JSON}", record)

    def set_ready(self, aside: Iterable[tuple[str, str]]) -> Ready:
        """Write that this node is ready, unless it has; return the record that is stored.

        An earlier record counts, even if it lists other paths than ``aside``.  Raises StoreError.
        """
        base = f"{self._attempt.node}{_READY}"
        self._create(base, Ready(self._attempt.node, tuple(aside)))
        return self._read(self._prefix + base, Ready)

    def show_progress(self, done: int) -> None:
        """Write how many bytes this node has downloaded, as a sign for the other nodes.

        Raises StoreError.
        """
        self._store.write(f"{self._prefix}{self._attempt.node}{_GETTING}", [f"{done}\n".encode()])

    def close(self, end: End) -> End:
        """Write how the attempt ended, unless a node has; return the end that counts for all nodes.

        Where the store has no exclusive creation, wait until no other writer can replace it.
        Raises StoreError.
        """
        self._create(_END, end)
        if not self._store.is_exclusive:
            time.sleep(max(self._store.late, _OVERWRITTEN))
        return self._read(self._prefix + _END, End)

    def _create(self, base: str, record: object) -> None:
        """Create a record; do nothing if it exists.  Raises StoreError."""
        try:
            self._store.create(self._prefix + base, [msgspec.json.encode(record) + b"\n"])
        except Exists:
            return

    def _read(self, name: str, kind: type[T]) -> T:
        """Return a record of a kind, from the cache if it was read before.

        Raise NotFound if it does not exist, Unsupported for a newer format, Corrupt if it cannot be
        read.
        """
        record = self._cache.get(name)
        if not isinstance(record, kind):
            data = read_all(self._store, name, SHORT_RECORD)
            if (number := format_number(data, name, "a record of an attempt")) > FORMAT:
                raise Unsupported(
                    f"{name}: record format {number}, at most {FORMAT} is known here",
                    hint="upgrade ckptsync on this machine",
                )
            record = _DECODERS[kind].decode(data, name, _ANEW)
            assert isinstance(record, kind)
            if kind is not End:  # where a store is not exclusive, the last writer's counts
                self._cache[name] = record
        return record


def failed(node: str, error: CkptsyncError) -> End:
    """Return the end of an attempt that failed on ``node`` with an error; raise nothing."""
    return End(node, f"{node}: {error}", error.hint, error.exit_code)


def forget_old_attempts(store: Store, run: str, keep: str) -> None:
    """Delete the records of all attempts of a run but the newest `ATTEMPTS`, and ``keep``.

    Raises StoreError, also if this node may not delete records.
    """
    prefix, last_written = resume_prefix(run), dict[str, float]()
    entries = list(store.names(prefix))
    for entry in entries:
        attempt = _attempt_of(entry, prefix)
        last_written[attempt] = max(entry.mtime, last_written.get(attempt, 0.0))
    newest_names = {keep, *sorted(last_written, key=lambda name: last_written[name])[-ATTEMPTS:]}
    _delete(
        store, (entry.name for entry in entries if _attempt_of(entry, prefix) not in newest_names)
    )


def _attempt_of(entry: Entry, prefix: str) -> str:
    """Return the attempt that a file below ``prefix`` belongs to."""
    return entry.name.removeprefix(prefix).partition("/")[0]


def _delete(store: Store, names: Iterable[str]) -> None:
    """Delete files.  Raises StoreError."""
    for name in names:
        store.delete(name)
