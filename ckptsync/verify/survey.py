"""What a store, or one run in it, holds: every place, the records that cannot be read, and when each file was written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptsync.errors import CkptsyncError, Corrupt, Exists, NotFound, Unsupported
from ckptsync.records.coding import Record, decode_any, encode, record_name
from ckptsync.records.names import RecordName, parse_record_name, records_prefix
from ckptsync.records.places import record_names, snapshots
from ckptsync.records.report import Finding, Report
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store, read_all


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that cannot be read."""

    name: str
    record: RecordName
    error: CkptsyncError

    @property
    def finding(self) -> Finding:
        """Damage, except to a report, which the next one replaces, and what is only newer than this program."""
        is_damage = isinstance(self.error, Corrupt) and self.record.kind != "report"
        return Finding("digest" if is_damage else "note", self.name.removeprefix(f"{self.record.run}/"), str(self.error))


@dataclass(frozen=True, slots=True)
class Survey:
    """``mtimes``: store name → seconds on the store's clock."""

    places: tuple[Snapshot, ...]
    faults: tuple[Fault, ...]
    mtimes: Mapping[str, float]

    def faults_of(self, run: str, place: str) -> tuple[Fault, ...]:
        """Those in the records of one place."""
        return tuple(f for f in self.faults if (f.record.run, f.record.place) == (run, place))

    def newer(self, run: str, place: str) -> Unsupported | None:
        """The first record of a place that was written by a newer program: nothing can be said about it here."""
        return next((f.error for f in self.faults_of(run, place) if isinstance(f.error, Unsupported)), None)


def survey(store: Store, run: str = "") -> Survey:
    """Read the names, then the records.  Raises StoreError; what is wrong with one record is a `Fault`."""
    entries = list(store.names(f"{run}/" if run else ""))
    records: dict[str, Record] = {}
    faults = []
    for name, parsed in record_names(entry.name for entry in entries).items():
        try:
            records[name] = decode_any(parsed, read_all(store, name))
        except NotFound:  # noqa: PERF203 - a read costs a thousand times more
            continue  # let go since it was listed
        except (Corrupt, Unsupported) as e:
            faults.append(Fault(name, parsed, e))
    found = snapshots(records, {entry.name: entry.size for entry in entries})
    return Survey(found, tuple(faults), {entry.name: entry.mtime for entry in entries})


def write_report(store: Store, report: Report) -> str:
    """Give it the highest number seen plus one, and write it; the record's name.  Raises StoreError."""
    listed = (parse_record_name(entry.name) for entry in store.names(records_prefix(report.run, report.place)))
    highest = max((p.n for p in listed if p and p.kind == "report"), default=0)
    last = replace(report, n=highest + 1)
    data = encode(last)
    name = record_name(last, data)
    with contextlib.suppress(Exists):  # named by its own bytes: it is this very report
        store.create(name, [data])
    return name
