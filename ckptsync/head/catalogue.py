"""Everything that a store holds, read once: names, and the records not read before."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptsync.errors import CkptsyncError, Corrupt, NotFound, Unsupported
from ckptsync.records.coding import Record, decode_any, is_made_anew
from ckptsync.records.names import RecordName, parse_record_name
from ckptsync.records.places import record_names, snapshots
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store, read_all

RECORD_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that cannot be read.  Nothing is said or done about its place, unless it is only a damaged seal or report: see `_hides`."""

    run: str
    place: str
    record: str
    error: CkptsyncError


@dataclass(frozen=True, slots=True)
class Catalogue:
    """``snapshots`` by run and step; ``faults`` in the order of their names."""

    snapshots: tuple[Snapshot, ...]
    faults: tuple[Fault, ...]


@dataclass(slots=True)
class RecordCache:
    """Records by name.  They never change under one name, so nothing here can be out of date; losing it costs reading again."""

    records: dict[str, Record] = field(default_factory=dict)


def read_catalogue(store: Store, run: str = "", cache: RecordCache | None = None) -> Catalogue:
    """What ``store`` holds, of one run or of all.  Raises StoreError; what is wrong with a single record is a `Fault`."""
    cache = cache or RecordCache()
    listed = {entry.name: entry.size for entry in store.names(f"{run}/" if run else "")}
    records: dict[str, Record] = {}
    faults: list[Fault] = []
    for name, parsed in record_names(listed).items():
        found = cache.records.get(name) or _read(store, name, parsed)
        if isinstance(found, Fault):
            faults.append(found)
        elif found:
            records[name] = found
    cache.records = records
    return Catalogue(snapshots(records, listed, {(f.run, f.place) for f in faults if _hides(f)}), tuple(faults))


def _hides(fault: Fault) -> bool:
    """Without a damaged seal or report a place is only not sealed, or not verified."""
    return not is_made_anew(parse_record_name(fault.record), fault.error)


def _read(store: Store, name: str, parsed: RecordName) -> Record | Fault | None:
    try:
        return decode_any(parsed, read_all(store, name, RECORD_LIMIT))
    except NotFound:
        return None  # it was let go since it was listed
    except (Corrupt, Unsupported) as e:
        return Fault(parsed.run, parsed.place, name, e)
