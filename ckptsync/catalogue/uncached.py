"""What a store holds now, with all records, sizes and times: nothing is cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptsync.catalogue.location_summary import Summary, summarize
from ckptsync.errors import ConfigError, Unsupported, without_frames
from ckptsync.near_names import near_names
from ckptsync.records.io import Fault, Record, find_missing_manifests, hidden_by, read_records
from ckptsync.records.location_status import LocationState, list_locations, record_names
from ckptsync.records.manifest import Manifest
from ckptsync.records.save_decisions import Tombstone, tombstones_in_force
from ckptsync.records.store_paths import checkpoint_of, consolidated_prefix, records_prefix
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Entry, Store


@dataclass(frozen=True, slots=True)
class StoreState:
    """``locations``: by run and step, also those with unreadable records.

    ``mtimes``: store name → seconds on the store's clock.
    """

    locations: tuple[LocationState, ...]
    faults: tuple[Fault, ...]
    mtimes: Mapping[str, float]

    @property
    def readable(self) -> tuple[LocationState, ...]:
        """The locations without an unreadable manifest or tombstone: others cannot be judged."""
        hidden = hidden_by(self.faults)
        return tuple(s for s in self.locations if (s.run, s.location) not in hidden)

    def of(self, run: str, location: str) -> LocationState | None:
        """Return one location; None if no manifest of it counts."""
        return next((s for s in self.locations if (s.run, s.location) == (run, location)), None)

    def summary_of(self, seen: LocationState) -> Summary:
        """Return one of the locations in short."""
        return summarize(seen, self.mtimes)

    def faults_of(self, run: str, location: str) -> tuple[Fault, ...]:
        """Return the faults in the records of one location."""
        return tuple(f for f in self.faults if (f.run, f.location) == (run, location))

    def newer(self, run: str, location: str) -> Unsupported | None:
        """Return the error of a location's first record that is newer than this program.

        Nothing can be said about such a location here.
        """
        errors = (without_frames(fault.error) for fault in self.faults_of(run, location))
        return next((error for error in errors if isinstance(error, Unsupported)), None)


def read_state(store: Store, run: str = "") -> StoreState:
    """Read all of ``run``, or of the store.

    Raises StoreError; what is wrong with one record is a `Fault`.
    """
    return _read(store, store.names(f"{run}/" if run else ""))


def read_checkpoints(store: Store, run: str, checkpoints: Iterable[str]) -> StoreState:
    """Read some checkpoints of a run, each in all its locations.

    Manifests of one name decide together which of them are one save.
    """

    def entries() -> Iterator[Entry]:
        for checkpoint in sorted(set(checkpoints)):
            for location in store.dirs(f"{run}/{RECORDS}/", checkpoint):
                if checkpoint_of(location) == checkpoint:
                    # Records first: the files that they name are stored before them.
                    yield from store.names(records_prefix(run, location))
                    yield from store.names(f"{run}/{location}/")
                    yield from store.names(consolidated_prefix(run, location))

    return _read(store, entries())


def read_location(store: Store, run: str, location: str) -> StoreState:
    """Read one location, and of others nothing."""
    found = read_checkpoints(store, run, [checkpoint_of(location)])
    here = found.of(run, location)
    return replace(found, locations=(here,) if here else (), faults=found.faults_of(run, location))


def not_found(store: Store, run: str, location: str = "") -> ConfigError:
    """Return the error for a missing run, or checkpoint of one, with a name that is like it.

    What was deleted has left records: then the error says so, and no such name is proposed.
    """
    checkpoints = [*store.dirs(f"{run}/{RECORDS}/")]
    if location and checkpoints:
        what = f"checkpoint {location!r} not found in run {run!r} of {store.url}"
        if location in checkpoints:
            what = f"checkpoint {location!r} of run {run!r} {_why_gone(store, run, location)}"
        near = near_names(location, checkpoints, 8)
        close = [name for name in near if _is_there(store, run, name)]
    else:
        what = f"run {run!r} not found in {store.url}"
        if checkpoints:
            what = f"run {run!r} has no checkpoint in {store.url} any more"
        close = near_names(run, [name for name in store.dirs("") if name != RECORDS])
    hint = f"did you mean {close[0]!r}?" if close else "`ckptsync ls` shows the runs"
    return ConfigError(what, hint=hint)


def _is_there(store: Store, run: str, location: str) -> bool:
    parsed = record_names(e.name for e in store.names(records_prefix(run, location)))
    return any(name.kind == "manifest" for name in parsed.values())


def _why_gone(store: Store, run: str, location: str) -> str:
    """Return why a location that has records has no manifest that counts."""
    parsed = record_names(e.name for e in store.names(records_prefix(run, location)))
    records, _ = read_records(store, parsed.values())
    stones = {name: r for name, r in records.items() if isinstance(r, Tombstone)}
    reasons = [
        stone.reason for stone in tombstones_in_force(stones).values() if stone.scope == "location"
    ]
    if any(isinstance(record, Manifest) for record in records.values()):
        return f"was moved to another location in {store.url}"
    if reasons:
        return f"was deleted from {store.url}{f': {reasons[0]}' if reasons[0] else ''}"
    return f"is not in {store.url}: no upload of it has ended, or its manifests were deleted"


def _read(store: Store, listed: Iterable[Entry]) -> StoreState:
    entries = list(listed)
    sizes = {entry.name: entry.size for entry in entries}
    records, faults = read_checkpoint_records(store, sizes)
    return StoreState(
        list_locations(records, sizes), faults, {entry.name: entry.mtime for entry in entries}
    )


def read_checkpoint_records(
    store: Store, sizes: Mapping[str, int]
) -> tuple[dict[str, Record], tuple[Fault, ...]]:
    """Return the records of whole checkpoints; and those unreadable, or named by others and gone.

    ``sizes``: of all that is listed of them.
    """
    records, faults = read_records(store, record_names(sizes).values(), sizes)
    gone = find_missing_manifests(records, sizes, store.size)
    lost = [Fault(name, parsed, gone[name]) for name, parsed in record_names(gone).items()]
    return records, tuple(sorted((*faults, *lost), key=lambda fault: fault.name))
