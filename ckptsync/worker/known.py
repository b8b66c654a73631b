"""What a store's records say of one run, read once a tick.  A record never changes, so each is fetched once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptsync.catalogue.fresh import read_record
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, Unsupported
from ckptsync.records import saves
from ckptsync.records.coding import Record, is_made_anew
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import OURS, RecordName, parse_record_name
from ckptsync.records.report import Report
from ckptsync.records.state import Records
from ckptsync.records.tombstone import Tombstone
from ckptsync.records.vanished import vanished
from ckptsync.stores.contract import Entry, Store
from ckptsync.worker.plan import Read
from ckptsync.worker.together import Together

R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone)
AT_ONCE = 16  # records that are fetched: each costs round trips, and no bandwidth


@dataclass(frozen=True, slots=True)
class Known:
    """Records by name; ``broken`` are those that cannot be read, with the reason: nothing is decided about their locations.

    ``times``: when each came, on the store's clock.  ``copies``: sizes of what lies beside the checkpoints, by name.
    ``grouped``: the records once more, by checkpoint.  ``lost``: manifests that model records and reports name, and that are gone.
    ``read``: by checkpoint, digests of this node's files that were read and need not be sent (`remember`); all views of one run share it.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    broken: Mapping[str, CkptsyncError] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    grouped: Mapping[str, Mapping[str, Record]] = field(default_factory=dict)
    lost: Mapping[str, CkptsyncError] = field(default_factory=dict)
    read: dict[str, Read] = field(default_factory=dict)

    def remember(self, checkpoint: str, read: Read) -> None:
        """Keep digests, so that the same files are not read again."""
        self.read[checkpoint] = {**self.read.get(checkpoint, {}), **read}

    def damaged(self) -> tuple[str, ...]:
        """Locations of which a report has ever said DAMAGED."""
        return tuple(sorted({r.location for r in self.records.values() if isinstance(r, Report) and r.verdict == "damaged"}))

    def manifests(self, checkpoint: str) -> tuple[saves.Known, ...]:
        """All of one checkpoint name, in every location, also those taken back."""
        return saves.known_of(self.grouped.get(checkpoint, {}))

    def tombstones(self, checkpoint: str) -> dict[str, Tombstone]:
        """All of one checkpoint name, in every location."""
        return {name: t for name, t in self.grouped.get(checkpoint, {}).items() if isinstance(t, Tombstone)}

    def location(self, location: str) -> Records:
        """All about one location."""
        here = {name: r for name, r in self.grouped.get(location.partition("~")[0], {}).items() if r.location == location}
        return Records(_only(here, Manifest), _only(here, ModelRecord), _only(here, Report), _only(here, Tombstone))

    def lost_of(self, node: str, checkpoint: str) -> tuple[RecordName, ...]:
        """Manifests of a node's that are gone, of one checkpoint name, in every location."""
        parsed = (parse_record_name(name) for name in self.lost)
        return tuple(p for p in parsed if p is not None and (p.node, p.location.partition("~")[0]) == (node, checkpoint))

    def is_unreadable(self, location: str) -> bool:
        """Whether any record about a location cannot be read, whoever may write it anew."""
        return any(parsed.location == location for parsed in map(parse_record_name, self.broken) if parsed is not None)

    def broken_location(self, checkpoint: str) -> CkptsyncError | None:
        """The first error in the records of a checkpoint's locations; not damage to model records and reports, which head and verifier make anew."""
        for name, error in self.broken.items():
            parsed = parse_record_name(name)
            if parsed is not None and not is_made_anew(parsed, error) and parsed.location.partition("~")[0] == checkpoint:
                return error
        return None


def read_known(store: Store, run: str, before: Known) -> Known:
    """The records of a run as they are now; ``before`` saves fetching those again that nobody has touched.  Raises StoreError.

    A record that a new report names is read again: a disk loses bits without a new time.
    """
    entries = tuple(store.names(f"{run}/{OURS}/"))
    named = [(e, parsed) for e in entries if (parsed := parse_record_name(e.name)) is not None and parsed.run == run]
    records = {e.name: before.records[e.name] for e, _ in named if _is_read(e, before)}
    fresh = [parsed for e, parsed in named if e.name not in records]
    found = _fetched(store, fresh)
    told = {f"{run}/{f.name}" for its in found.values() if isinstance(its, Report) for f in its.findings}
    found |= _fetched(store, [parsed for e, parsed in named if e.name in told and e.name in records])
    records = {name: record for name, record in records.items() if name not in found}
    records |= {name: its for name, its in found.items() if its is not None and not isinstance(its, CkptsyncError)}
    broken = {name: its for name, its in found.items() if isinstance(its, CkptsyncError)}
    grouped: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        grouped.setdefault(record.location.partition("~")[0], {})[name] = record
    sizes = {e.name: e.size for e in entries}
    is_same = not found and not before.lost and records.keys() == before.records.keys()
    lost = before.lost if is_same else vanished(records, sizes, store.size)
    return Known(records, broken, {e.name: e.mtime for e in entries}, sizes, grouped, lost, before.read)


def _is_read(entry: Entry, before: Known) -> bool:
    is_same = (before.times.get(entry.name), before.copies.get(entry.name)) == (entry.mtime, entry.size)
    return is_same and entry.name in before.records


def _fetched(store: Store, names: Sequence[RecordName]) -> dict[str, Record | CkptsyncError | None]:
    return dict(zip(map(str, names), Together(AT_ONCE).each(lambda name: _one(store, name), names), strict=True))


def _one(store: Store, name: RecordName) -> Record | CkptsyncError | None:
    """``None`` if it is gone: gc was quicker."""
    try:
        return read_record(store, name)
    except NotFound:
        return None
    except (Corrupt, Unsupported) as e:
        return e


def _only(records: Mapping[str, Record], kind: type[R]) -> dict[str, R]:
    return {name: r for name, r in records.items() if isinstance(r, kind)}
