"""What the store says of the runs of this node: the records of each run, and what follows from them for a save that lies here.

`StoreView` reads the records once a tick, and each record once, since a record never changes.  What follows from them is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from ckptsync.catalogue.fresh import read_record
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, Unsupported
from ckptsync.model import Demands
from ckptsync.records import saves
from ckptsync.records.coding import Record, is_made_anew
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import OURS, RecordName, parse_record_name, sending_prefix
from ckptsync.records.report import Report
from ckptsync.records.state import Records, newest_model_record, proof
from ckptsync.records.tombstone import Tombstone, fate
from ckptsync.records.vanished import vanished
from ckptsync.stores.contract import Entry, Store
from ckptsync.walk import Stat
from ckptsync.worker import plan
from ckptsync.worker.options import RunDir
from ckptsync.worker.plan import Read
from ckptsync.worker.remembering import read_before
from ckptsync.worker.result import Phase
from ckptsync.worker.selecting import EVERYTHING, Selection, select
from ckptsync.worker.snapshot import Seen
from ckptsync.worker.together import Together

R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone)
AT_ONCE = 16  # records that are fetched: each costs round trips, and no bandwidth
GRACE = 900.0  # seconds on the store's clock after which a node that no longer says that it sends, sends no more: it says so every minute


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run, by name; ``broken`` are those that cannot be read, with the reason: nothing is decided about their locations.

    ``times``: when each came, on the store's clock.  ``sizes``: bytes of all that lies in the run's `.ckptsync`, by name.
    ``grouped``: the records once more, by checkpoint.  ``lost``: manifests that model records and reports name, and that are gone.
    ``read``: by checkpoint, digests of this node's files that were read and need not be sent (`remember`); all views of one run share it.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    broken: Mapping[str, CkptsyncError] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
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

    def is_contended(self, node: str, run: str, checkpoint: str) -> bool:
        """Whether a live node other than ``node`` says that it is sending files of a checkpoint."""
        prefix = sending_prefix(run, checkpoint)
        now = max(self.times.values(), default=0.0)
        others = (name for name, size in self.sizes.items() if size and name.startswith(prefix) and name != prefix + node)
        return any(now - self.times[name] < GRACE for name in others)

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


def read_records(store: Store, run: str, before: RunRecords) -> RunRecords:
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
    return RunRecords(records, broken, {e.name: e.mtime for e in entries}, sizes, grouped, lost, before.read)


def _is_read(entry: Entry, before: RunRecords) -> bool:
    is_same = (before.times.get(entry.name), before.sizes.get(entry.name)) == (entry.mtime, entry.size)
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


@dataclass(frozen=True, slots=True)
class Standing:
    """Why nothing is left to do for a save: ``mine`` or ``other`` is the manifest that names its files already."""

    phase: Phase
    detail: str
    mine: Manifest | None = None
    other: Manifest | None = None


def standing(seen: Seen, node: str, known: RunRecords, selection: Selection = EVERYTHING) -> Standing | None:
    """What need not be looked at any further: it is stored, by this node or another on the same disk, or it was given up."""
    if seen.pin is not None and seen.pin.node not in ("", node):
        return Standing("elsewhere", f"{seen.pin.node} sends it")
    if is_given_up(seen, node, known, selection):
        return Standing("retired", "given up in the store")
    found = own(seen.hold.stats, node, known, seen.spot.name, selection)
    return None if found is None else held(found, node)


def held(there: Manifest, node: str) -> Standing:
    """Of files that a save in the store has: ``there`` is a manifest of it, this node's if it has one."""
    if there.node == node:
        return Standing("stored", "stored", there)
    return Standing("elsewhere", f"the store has these very files in {there.location}", other=there)


def own(stats: Sequence[Stat], node: str, known: RunRecords, checkpoint: str, selection: Selection) -> Manifest | None:
    """Return a manifest of the save that has these files, but for those that are not sent by choice; this node's if it has one there."""
    manifests = [k.manifest for k in saves.live(known.manifests(checkpoint))]
    read = known.read.get(checkpoint, {})
    if selection.is_everything:
        return plan.holder(stats, node, manifests, read)
    found = (plan.holder(_wanted(stats, selection, m.demands), node, manifests, read) for m in manifests)
    return next((m for m in found if m is not None), None)


def _wanted(stats: Sequence[Stat], selection: Selection, demands: Demands) -> list[Stat]:
    names = select((s.path for s in stats), selection, demands)
    return [s for s in stats if s.path in names]


def is_given_up(seen: Seen, node: str, known: RunRecords, selection: Selection = EVERYTHING) -> bool:
    """Whether a tombstone speaks of these very files, as far as they are sent."""
    name = seen.spot.name
    stats = seen.hold.stats if selection.is_everything else _wanted(seen.hold.stats, selection, Demands())
    buried = {n: (t, known.times.get(n, 0.0)) for n, t in known.tombstones(name).items()}
    return plan.is_retired(node, stats, buried, known.manifests(name))


@dataclass(slots=True)
class StoreView:
    """A cached view of the store's records.  `refresh` does all I/O; every other method reads the cache.  Any thread may call any of them.

    ``offset``: this node's clock minus the store's, ns, as far as it was measured.
    """

    store: Store
    node: str
    selection: Selection
    offset: Callable[[], int]
    _of: dict[str, RunRecords] = field(default_factory=dict)
    _turns: Iterator[int] = field(default_factory=lambda: count(1))
    _read: dict[str, int] = field(default_factory=dict)

    def refresh(self, run: str) -> RunRecords:
        """The records of a run as they are now.  Raises StoreError."""
        turn = next(self._turns)
        found = read_records(self.store, run, self.of(run))
        if turn > self._read.get(run, 0):  # what began earlier and ended later is no news
            self._read[run], self._of[run] = turn, found
        return found

    def recall(self, run: RunDir) -> None:
        """Take up what the spool has of digests that were read."""
        known = self._of.setdefault(run.name, RunRecords())
        for checkpoint, read in read_before(run.path).items():
            known.remember(checkpoint, read)

    def of(self, run: str) -> RunRecords:
        """As they were read last."""
        return self._of.get(run) or RunRecords()

    def own(self, run: str, checkpoint: str, stats: Sequence[Stat]) -> Manifest | None:
        """A manifest of the save that has these files, but for those that are not sent by choice."""
        return own(stats, self.node, self.of(run), checkpoint, self.selection)

    def is_proven(self, run: str, checkpoint: str, stats: Sequence[Stat]) -> bool:
        """Whether the store has these very files, VERIFIED or given up: then they need no pin."""
        known = self.of(run)
        mine = self.own(run, checkpoint, stats)
        return mine is not None and is_safe(known, mine.location, saves.live(known.manifests(checkpoint)))

    def is_done(self, seen: Seen) -> bool:
        """Whether nothing is left to do here: it is stored, another's, or given up."""
        return standing(seen, self.node, self.of(seen.run), self.selection) is not None

    def has_mate(self, seen: Seen) -> bool:
        """Whether another node has stored its part of the same save."""
        live = [k.manifest for k in saves.live(self.of(seen.run).manifests(seen.spot.name))]
        if not any(m.node != self.node for m in live):
            return False
        return plan.has_mate(seen.hold.stats, self.node, self.offset(), live)

    def is_begun(self, seen: Seen) -> bool:
        """Whether part of it is in the store already: this node said that it was sending it, or another has sent its part."""
        said = sending_prefix(seen.run, seen.spot.name) + self.node
        return bool(self.of(seen.run).sizes.get(said)) or self.has_mate(seen)


def is_safe(known: RunRecords, location: str, live: Sequence[saves.Known], *, retired_too: bool = True) -> bool:
    """Whether a location's manifests are proven by a report of its model record, or given up; not where a newer program has said what is not known here."""
    if known.broken_location(location.partition("~")[0]) is not None:
        return False
    here = [k for k in live if k.manifest.location == location]
    records = known.location(location)
    model_record, _ = newest_model_record(records.model_records, here)
    names = {k.name for k in here}
    found = fate(records.tombstones, names)
    is_given_up = retired_too and bool(found.retired or found.shards)
    return is_given_up or (bool(model_record) and proof(records.reports, names, model_record).holds)
