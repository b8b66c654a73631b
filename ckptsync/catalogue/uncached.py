"""What a store holds now, with all records, sizes and times; nothing is cached.

Whoever deletes, overwrites or verifies must not rest on what was read before. So these functions
list and read whole checkpoints: manifests of one name decide together which of them are one save.
"""

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
    """What was read of a store, a run, or some checkpoints.

    ``locations``: by run and step, also those with unreadable records. ``mtimes``: store name →
    seconds on the store's clock.
    """

    locations: tuple[LocationState, ...]
    faults: tuple[Fault, ...]
    mtimes: Mapping[str, float]

    @property
    def readable(self) -> tuple[LocationState, ...]:
        """Return the locations that no unreadable record hides (`hidden_by`)."""
        hidden = hidden_by(self.faults)
        return tuple(s for s in self.locations if (s.run, s.location) not in hidden)

    def of(self, run: str, location: str) -> LocationState | None:
        """Return one location; None if no manifest of it counts or it was not read."""
        return next((s for s in self.locations if (s.run, s.location) == (run, location)), None)

    def summary_of(self, state: LocationState) -> Summary:
        """Return the summary of one of the locations."""
        return summarize(state, self.mtimes)

    def faults_of(self, run: str, location: str) -> tuple[Fault, ...]:
        """Return the faults in the records of one location."""
        return tuple(f for f in self.faults if (f.run, f.location) == (run, location))

    def newer(self, run: str, location: str) -> Unsupported | None:
        """Return the error of a location's first record that a newer program wrote, or None.

        Such a location cannot be judged by this program. The error is returned, not raised.
        """
        errors = (without_frames(fault.error) for fault in self.faults_of(run, location))
        return next((error for error in errors if isinstance(error, Unsupported)), None)


def read_state(store: Store, run: str = "") -> StoreState:
    """List and read all of ``run``, or of the store if it is empty.

    Raise StoreError; a record that cannot be read is a `Fault`.
    """
    return _read(store, store.names(f"{run}/" if run else ""))


def read_checkpoints(store: Store, run: str, checkpoints: Iterable[str]) -> StoreState:
    """List and read some checkpoints of a run, each in all its locations.

    Raise StoreError; a record that cannot be read is a `Fault`.
    """

    def entries() -> Iterator[Entry]:
        """Yield the entries of these checkpoints, of each location its records first."""
        for checkpoint in sorted(set(checkpoints)):
            for location in store.dirs(f"{run}/{RECORDS}/", checkpoint):
                if checkpoint_of(location) == checkpoint:
                    # Records first: the files that they name are stored before them.
                    yield from store.names(records_prefix(run, location))
                    yield from store.names(f"{run}/{location}/")
                    yield from store.names(consolidated_prefix(run, location))

    return _read(store, entries())


def read_location(store: Store, run: str, location: str) -> StoreState:
    """Return the state of one location alone; its whole checkpoint is listed and read for it.

    ``locations`` is empty if no manifest of it counts; ``mtimes`` are of the whole checkpoint.
    Raise StoreError.
    """
    checkpoint_state = read_checkpoints(store, run, [checkpoint_of(location)])
    location_state = checkpoint_state.of(run, location)
    return replace(
        checkpoint_state,
        locations=(location_state,) if location_state else (),
        faults=checkpoint_state.faults_of(run, location),
    )


def not_found(store: Store, run: str, location: str = "") -> ConfigError:
    """Return, not raise, the error for a run, or a checkpoint of it, that is not in the store.

    The store is listed for it. The hint is the most similar stored name, or `ckptsync ls`. Of a
    deleted or moved checkpoint, or a run that has none left, the records that are left say so.
    Raise StoreError.
    """
    checkpoints = [*store.dirs(f"{run}/{RECORDS}/")]
    if location and checkpoints:
        text = f"checkpoint {location!r} not found in run {run!r} of {store.url}"
        if location in checkpoints:
            text = (
                f"checkpoint {location!r} of run {run!r} {_explain_absence(store, run, location)}"
            )
        similar = near_names(location, checkpoints, 8)
        stored = [name for name in similar if _has_manifest(store, run, name)]
    else:
        text = f"run {run!r} not found in {store.url}"
        if checkpoints:
            text = f"run {run!r} has no checkpoint in {store.url} any more"
        stored = near_names(run, [name for name in store.dirs("") if name != RECORDS])
    hint = f"did you mean {stored[0]!r}?" if stored else "`ckptsync ls` shows the runs"
    return ConfigError(text, hint=hint)


def _has_manifest(store: Store, run: str, location: str) -> bool:
    """List the records of a location; return whether a manifest is among them. Raise StoreError."""
    parsed = record_names(e.name for e in store.names(records_prefix(run, location)))
    return any(name.kind == "manifest" for name in parsed.values())


def _explain_absence(store: Store, run: str, location: str) -> str:
    """Return the end of a sentence: why a location that has records has no manifest that counts.

    It was moved if a manifest is left, else deleted if a tombstone is in force, else never
    finished. Its records are listed and read; unreadable ones are ignored. Raise StoreError.
    """
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
    """Read the records of whole checkpoints, of which ``listed`` are all entries; return the state.

    Raise StoreError.
    """
    entries = list(listed)
    sizes = {entry.name: entry.size for entry in entries}
    records, faults = read_checkpoint_records(store, sizes)
    return StoreState(
        list_locations(records, sizes), faults, {entry.name: entry.mtime for entry in entries}
    )


def read_checkpoint_records(
    store: Store, sizes: Mapping[str, int]
) -> tuple[dict[str, Record], tuple[Fault, ...]]:
    """Return the records of whole checkpoints by name, and a fault for each that cannot be read.

    A manifest that a record names and that is gone is a fault, too (`find_missing_manifests`). A
    record deleted since it was listed is in neither. ``sizes``: name → bytes of all that is listed
    of these checkpoints. Raise StoreError.
    """
    records, faults = read_records(store, record_names(sizes).values(), sizes)
    missing = find_missing_manifests(records, sizes, store.size)
    missing_faults = [
        Fault(name, parsed, missing[name]) for name, parsed in record_names(missing).items()
    ]
    return records, tuple(sorted((*faults, *missing_faults), key=lambda fault: fault.name))
