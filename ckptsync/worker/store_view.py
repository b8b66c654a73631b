"""A cached view of a run's records in the store, and what follows for a save that lies here.

Every plan asks many questions about the store, which may be far away.  `StoreView.refresh` does all
reading: each record once, and again when a new report names it.  The answers are pure functions of
what was read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from ckptsync.errors import CkptsyncError, Corrupt, without_frames
from ckptsync.records import manifest_groups
from ckptsync.records.io import AT_ONCE, Record, find_missing_manifests, is_made_anew, read_records
from ckptsync.records.location_status import (
    LocationRecords,
    newest_model_record,
    proof,
    record_names,
)
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Report
from ckptsync.records.save_decisions import Tombstone, fate
from ckptsync.records.store_paths import (
    RecordName,
    checkpoint_of,
    senders,
    sending_prefix,
)
from ckptsync.records.upload_decision import (
    KnownDigests,
    Reading,
    find_holder,
    has_other_part,
    is_retired,
)
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Entry, Store
from ckptsync.tensors import Demands
from ckptsync.walk import Stat
from ckptsync.worker.file_selection import EVERYTHING, Selection, select
from ckptsync.worker.local_save import LocalSave
from ckptsync.worker.results import Phase

R = TypeVar("R", Manifest, ModelRecord, Report, Tombstone)


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run, by name.

    ``broken``: records that cannot be read, with the reason; nothing is decided about their
    locations. ``times``: when each record came, on the store's clock.  ``sizes``: bytes of each
    file in the run's `.ckptsync`.  ``grouped``: the records by checkpoint.  ``lost``: manifests
    that model records and reports name, and that the store does not have any more.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    broken: Mapping[str, CkptsyncError] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    grouped: Mapping[str, Mapping[str, Record]] = field(default_factory=dict)
    lost: Mapping[str, CkptsyncError] = field(default_factory=dict)

    def damaged(self) -> tuple[str, ...]:
        """Return, sorted, the locations that some report calls damaged, whatever later ones say."""
        return tuple(
            sorted(
                {
                    r.location
                    for r in self.records.values()
                    if isinstance(r, Report) and r.verdict == "damaged"
                }
            )
        )

    def manifests(self, checkpoint: str) -> tuple[manifest_groups.StoredManifest, ...]:
        """Return all manifests of a checkpoint's name, also superseded ones."""
        return manifest_groups.collect_manifests(self.grouped.get(checkpoint, {}))

    def live_manifests_in(self, location: str) -> list[manifest_groups.StoredManifest]:
        """Return the manifests of one location that are not superseded."""
        stored_manifests = self.manifests(checkpoint_of(location))
        return [
            stored
            for stored in manifest_groups.live_manifests(stored_manifests)
            if stored.manifest.location == location
        ]

    def live_manifests(self, checkpoint: str) -> list[Manifest]:
        """Return the manifests of a checkpoint's name that are not superseded."""
        return [
            stored.manifest for stored in manifest_groups.live_manifests(self.manifests(checkpoint))
        ]

    def tombstones(self, checkpoint: str) -> dict[str, Tombstone]:
        """Return all tombstones of a checkpoint's name."""
        return _records_of_kind(self.grouped.get(checkpoint, {}), Tombstone)

    def records_about(self, location: str) -> LocationRecords:
        """Return all records about one location."""
        by_name = {
            name: r
            for name, r in self.grouped.get(checkpoint_of(location), {}).items()
            if r.location == location
        }
        return LocationRecords(
            _records_of_kind(by_name, Manifest),
            _records_of_kind(by_name, ModelRecord),
            _records_of_kind(by_name, Report),
            _records_of_kind(by_name, Tombstone),
        )

    def unusable_manifests(self, node: str) -> tuple[RecordName, ...]:
        """Return a node's manifests that are damaged or gone; a newer program's are neither."""
        damaged = (name for name, error in self.broken.items() if isinstance(error, Corrupt))
        names = record_names((*damaged, *self.lost)).values()
        return tuple(p for p in names if (p.kind, p.node) == ("manifest", node))

    def lost_of(self, node: str, checkpoint: str) -> tuple[str, ...]:
        """Return the names of a node's manifests of a checkpoint that the store has lost."""
        return tuple(
            sorted(
                name
                for name, p in record_names(self.lost).items()
                if (p.node, checkpoint_of(p.location)) == (node, checkpoint)
            )
        )

    def is_contended(self, node: str, run: str, checkpoint: str) -> bool:
        """Return whether another node announces that it is sending files of a checkpoint.

        Decided by the last listing: an announcement counts if it is less than `SENDING` seconds
        older than the newest file.
        """
        prefix = sending_prefix(run, checkpoint)
        announcements = [
            Entry(name, size, self.times[name])
            for name, size in self.sizes.items()
            if name.startswith(prefix)
        ]
        sending = senders(announcements, max(self.times.values(), default=0.0)).get(
            (run, checkpoint), {}
        )
        return bool(sending.keys() - {node})

    def reading(self, node: str, run: str, checkpoint: str, time_ns: int) -> Reading:
        """Return the values that decide an upload; ``time_ns``: now, by the node's clock."""
        is_contended = self.is_contended(node, run, checkpoint)
        return Reading(self.manifests(checkpoint), is_contended, time_ns)

    def is_unreadable(self, location: str) -> bool:
        """Return whether any record about a location cannot be read."""
        return any(p.location == location for p in record_names(self.broken).values())

    def broken_location(self, checkpoint: str) -> CkptsyncError | None:
        """Return the first error in the records of a checkpoint's locations, or None.

        Errors of model records and reports do not count: heads and verifiers make those anew.
        """
        errors = (
            self.broken[name]
            for name, p in record_names(self.broken).items()
            if checkpoint_of(p.location) == checkpoint and not is_made_anew(p, self.broken[name])
        )
        return next(map(without_frames, errors), None)

    def is_damaged(self, location: str) -> bool:
        """Return whether a report calls a location damaged and no later report answers it."""
        records, manifests = self.records_about(location), self.live_manifests_in(location)
        model_record, _ = newest_model_record(records.model_records, manifests)
        return bool(
            proof(records.reports, {stored.name for stored in manifests}, model_record).damage
        )

    def is_safe(self, location: str, *, retired_too: bool = True) -> bool:
        """Return whether a location is VERIFIED with its model and not given up.

        If the store has given it up, or its shards, return ``retired_too``.  False where a record
        cannot be read: a newer program may have written it.
        """
        if self.broken_location(checkpoint_of(location)) is not None:
            return False
        manifests, records = self.live_manifests_in(location), self.records_about(location)
        model_record, _ = newest_model_record(records.model_records, manifests)
        names = {stored.name for stored in manifests}
        decision = fate(records.tombstones, names)
        if decision.retired or decision.shards:
            return retired_too
        return bool(model_record) and proof(records.reports, names, model_record).holds


def read_run(store: Store, run: str, before: RunRecords) -> RunRecords:
    """Return the records of a run as they are now.

    Records of ``before`` with the same time and size are not read again, except those that a new
    report names: a disk loses bits without a new time.  Raises StoreError.
    """
    entries = tuple(store.names(f"{run}/{RECORDS}/"))
    parsed_names = {
        name: parsed
        for name, parsed in record_names(e.name for e in entries).items()
        if parsed.run == run
    }
    cache = {
        e.name: before.records[e.name]
        for e in entries
        if e.name in before.records
        and (before.times.get(e.name), before.sizes.get(e.name)) == (e.mtime, e.size)
    }
    records, faults = read_records(store, parsed_names.values(), cache=cache, threads=AT_ONCE)
    new_records = [r for name, r in records.items() if name not in cache]
    reported = {
        f"{run}/{f.name}" for r in new_records if isinstance(r, Report) for f in r.findings
    } & cache.keys()
    again, more_faults = read_records(
        store, [parsed_names[name] for name in sorted(reported)], threads=AT_ONCE
    )
    records = {name: r for name, r in records.items() if name not in reported} | again
    broken = {fault.name: fault.error for fault in (*faults, *more_faults)}
    grouped: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        grouped.setdefault(checkpoint_of(record.location), {})[name] = record
    sizes = {e.name: e.size for e in entries}
    # without a new record none was read again
    is_same = not (new_records or before.lost) and records.keys() == before.records.keys()
    lost = before.lost if is_same else find_missing_manifests(records, sizes, store.size)
    return RunRecords(records, broken, {e.name: e.mtime for e in entries}, sizes, grouped, lost)


def _records_of_kind(records: Mapping[str, Record], kind: type[R]) -> dict[str, R]:
    """Return the records of one type."""
    return {name: r for name, r in records.items() if isinstance(r, kind)}


@dataclass(frozen=True, slots=True)
class Done:
    """Why nothing is left to do for a save.

    ``manifest``: names its files already; it is this node's own if the phase is ``stored``.
    """

    phase: Phase
    detail: str
    manifest: Manifest | None = None


@dataclass(slots=True)
class StoreView:
    """A cached view of a run's records in the store, and what follows for a save on this node.

    `refresh` does all I/O; every other method reads the cache.  Thread-safe.  ``offset``: returns
    this node's clock minus the store's (ns), as last measured.  ``run_records``: the records as
    last read. ``known_digests``: by checkpoint, digests of this node's files that were read and
    need not be sent.
    """

    store: Store
    node: str
    run: str
    selection: Selection = EVERYTHING
    offset: Callable[[], int] = lambda: 0
    run_records: RunRecords = field(default_factory=RunRecords)
    known_digests: dict[str, KnownDigests] = field(default_factory=dict)
    _tickets: Iterator[int] = field(default_factory=lambda: count(1))
    _latest_ticket: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def refresh(self) -> RunRecords:
        """Read the records, make them the view's, and return them.  Raises StoreError.

        A refresh that ends after a later one has ended leaves the view as it is; it returns what it
        has read all the same.
        """
        ticket = next(self._tickets)
        records = read_run(self.store, self.run, self.run_records)
        with self._lock:
            if ticket > self._latest_ticket:
                self._latest_ticket, self.run_records = ticket, records
        return records

    def remember(self, checkpoint: str, digests: KnownDigests) -> None:
        """Add digests of files to the view, so that the same files are not read again."""
        with self._lock:
            before = self.known_digests.get(checkpoint, {})
            self.known_digests[checkpoint] = {**before, **digests}

    def why_done(self, local_save: LocalSave) -> Done | None:
        """Return why nothing is left to do for a save, or None if it is to be uploaded.

        It is stored or was given up, or its pin is another node's, which uploads it.
        """
        if local_save.pin is not None and local_save.pin.node not in ("", self.node):
            return Done("elsewhere", f"{local_save.pin.node} uploads it")
        # before the tombstones are read: a refresh meanwhile may add one and remove the manifests
        manifest = self.find_save(local_save.files.stats, local_save.checkpoint, self.selection)
        if self.is_given_up(local_save, self.selection):
            return Done("retired", "retired in the store")
        return None if manifest is None else self.done_by(manifest)

    def done_by(self, manifest: Manifest) -> Done:
        """Return why nothing is left to do for a save that ``manifest`` describes.

        Its phase is ``stored`` if this node wrote the manifest, else ``elsewhere``.
        """
        if manifest.node == self.node:
            return Done("stored", "stored", manifest)
        return Done(
            "elsewhere", f"the store already has these files in {manifest.location}", manifest
        )

    def find_save(
        self, stats: Sequence[Stat], checkpoint: str, selection: Selection
    ) -> Manifest | None:
        """Return a manifest of the save that has these files, or None; this node's is preferred.

        Files that are not sent by choice are ignored.
        """
        manifests, digests = (
            self.run_records.live_manifests(checkpoint),
            self.known_digests.get(checkpoint, {}),
        )
        if selection.is_everything:
            return find_holder(stats, self.node, manifests, digests)
        holders = (
            find_holder(_select_stats(stats, selection, m.demands), self.node, manifests, digests)
            for m in manifests
        )
        return next((m for m in holders if m is not None), None)

    def is_given_up(self, local_save: LocalSave, selection: Selection) -> bool:
        """Return whether a tombstone is about these very files, as far as they are sent."""
        records, stats = self.run_records, local_save.files.stats
        if not selection.is_everything:
            stats = tuple(_select_stats(stats, selection, Demands()))
        buried = {
            name: (stone, records.times.get(name, 0.0))
            for name, stone in records.tombstones(local_save.checkpoint).items()
        }
        return is_retired(self.node, stats, buried, records.manifests(local_save.checkpoint))

    def is_proven(self, checkpoint: str, stats: Sequence[Stat]) -> bool:
        """Return whether the store has these very files, VERIFIED or given up: no pin is needed."""
        manifest = self.find_save(stats, checkpoint, self.selection)
        return manifest is not None and self.run_records.is_safe(manifest.location)

    def is_done(self, local_save: LocalSave) -> bool:
        """Return whether nothing is left to do: the save is stored, another node's, or given up."""
        return self.why_done(local_save) is not None

    def has_other_part(self, local_save: LocalSave) -> bool:
        """Return whether another node has stored its part of the same save."""
        manifests = self.run_records.live_manifests(local_save.checkpoint)
        return has_other_part(local_save.files.stats, self.node, self.offset(), manifests)

    def is_begun(self, local_save: LocalSave) -> bool:
        """Return whether this node has announced a save, or another one has stored its part."""
        announcement = sending_prefix(self.run, local_save.checkpoint) + self.node
        return bool(self.run_records.sizes.get(announcement)) or self.has_other_part(local_save)


def _select_stats(stats: Sequence[Stat], selection: Selection, demands: Demands) -> list[Stat]:
    """Return the stats of the files that ``selection`` sends, in the same order."""
    names = select((s.path for s in stats), selection, demands)
    return [s for s in stats if s.path in names]
