"""What a store holds now, of a run or of one location, with every record and the size and time of every file: nothing is remembered, so it may be acted on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Corrupt, NotFound, Unsupported
from ckptsync.records.coding import LIMITS, Record, decode_any, is_made_anew
from ckptsync.records.locations import record_names, snapshots
from ckptsync.records.names import OURS, RecordName, consolidated_prefix, records_prefix
from ckptsync.records.state import Snapshot
from ckptsync.records.vanished import vanished
from ckptsync.stores.contract import Entry, Store


@dataclass(frozen=True, slots=True)
class Fresh:
    """``locations``: by run and step, also those with records that cannot be read.  ``mtimes``: store name → seconds on the store's clock."""

    locations: tuple[Snapshot, ...]
    faults: tuple[Fault, ...]
    mtimes: Mapping[str, float]

    @property
    def readable(self) -> tuple[Snapshot, ...]:
        """Those of which something may be said: a manifest or a tombstone that cannot be read hides its location."""
        hidden = hidden_by(self.faults)
        return tuple(s for s in self.locations if (s.run, s.location) not in hidden)

    def of(self, run: str, location: str) -> Snapshot | None:
        """One location; ``None`` where no manifest counts."""
        return next((s for s in self.locations if (s.run, s.location) == (run, location)), None)

    def faults_of(self, run: str, location: str) -> tuple[Fault, ...]:
        """Those in the records of one location."""
        return tuple(f for f in self.faults if (f.run, f.location) == (run, location))

    def newer(self, run: str, location: str) -> Unsupported | None:
        """The first record of a location that was written by a newer program: nothing can be said about it here."""
        return next((f.error for f in self.faults_of(run, location) if isinstance(f.error, Unsupported)), None)


def fresh(store: Store, run: str = "") -> Fresh:
    """All of ``run``, or of the store.  Raises StoreError; what is wrong with one record is a `Fault`."""
    return _found(store, store.names(f"{run}/" if run else ""))


def fresh_checkpoints(store: Store, run: str, checkpoints: Iterable[str]) -> Fresh:
    """Some checkpoints of a run in all their locations, however many others it has: which manifests are one save, those of one name decide together."""
    return _found(store, (entry for name in sorted(set(checkpoints)) for entry in _entries(store, run, name)))


def fresh_location(store: Store, run: str, location: str) -> Fresh:
    """One location, and of others nothing."""
    found = fresh_checkpoints(store, run, [location.partition("~")[0]])
    here = found.of(run, location)
    return replace(found, locations=(here,) if here else (), faults=found.faults_of(run, location))


def _found(store: Store, listed: Iterable[Entry]) -> Fresh:
    entries = list(listed)
    sizes = {entry.name: entry.size for entry in entries}
    records, faults = read_checkpoints(store, sizes)
    found = snapshots(records, sizes)
    return Fresh(found, faults, {entry.name: entry.mtime for entry in entries})


def _entries(store: Store, run: str, checkpoint: str) -> Iterator[Entry]:
    """Records first: the files that one names were there before it, and so are listed."""
    for location in store.dirs(f"{run}/{OURS}/", checkpoint):
        if location.partition("~")[0] == checkpoint:
            for prefix in (records_prefix(run, location), f"{run}/{location}/", consolidated_prefix(run, location)):
                yield from store.names(prefix)


def read_records(
    store: Store, names: Mapping[str, RecordName], sizes: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, Record], tuple[Fault, ...]]:
    """Those that are still there, and those that cannot be read.  Raises StoreError.  ``sizes``: as listed; whose is not known is asked for."""
    records: dict[str, Record] = {}
    faults = []
    for name, parsed in names.items():
        try:
            records[name] = read_record(store, parsed, sizes.get(name))
        except NotFound:  # noqa: PERF203 - a read costs a thousand times more
            continue  # let go since it was listed
        except (Corrupt, Unsupported) as e:
            faults.append(Fault(name, parsed, e))
    return records, tuple(faults)


def read_checkpoints(store: Store, sizes: Mapping[str, int]) -> tuple[dict[str, Record], tuple[Fault, ...]]:
    """As `read_records`, of whole checkpoints: what their records name and is gone is a fault, too.  ``sizes``: of all that is listed of them."""
    records, faults = read_records(store, record_names(sizes), sizes)
    gone = vanished(records, sizes, store.size)
    lost = [Fault(name, parsed, gone[name]) for name, parsed in record_names(gone).items()]
    return records, tuple(sorted((*faults, *lost), key=lambda fault: fault.name))


def read_record(store: Store, parsed: RecordName, size: int | None = None) -> Record:
    """Return one record; raise NotFound and StoreError, and Corrupt or Unsupported for what is wrong with itself.

    ``size``: as listed, where it is known. No more is fetched than a record of its kind may have.
    """
    name, limit = str(parsed), LIMITS[parsed.kind]
    size = store.size(name) if size is None else size
    if size > limit:
        raise Corrupt(f"{name}: {size} bytes, at most {limit} expected of a {parsed.kind}")
    out = bytearray(size)
    store.read_into(name, 0, memoryview(out))
    return decode_any(parsed, bytes(out))


def hidden_by(faults: Iterable[Fault]) -> Collection[tuple[str, str]]:
    """Run and location of those of which nothing is said.  Without a damaged model record or report a location is only not consolidated, or not verified."""
    return {(f.run, f.location) for f in faults if not is_made_anew(f.record, f.error)}
