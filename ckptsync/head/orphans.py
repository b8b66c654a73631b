"""Orphaned files: files that no record names, unneeded copies, drafts of killed writers.

Killed uploads leave files that nobody needs, but a file may also be on its way, or be a person's.
So a file is orphaned only in directories of locations that a record, or a node's announcement of an
upload, names; only if every record of that checkpoint can be read; if nobody has written it for
`IDLE`, and no node announces an upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptsync.catalogue.uncached import read_checkpoint_records
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.head.removal import check_alone
from ckptsync.records.location_status import record_names
from ckptsync.records.manifest_groups import collect_manifests, live_manifests
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.store_paths import (
    checked_own,
    checkpoint_of,
    own_prefixes,
    parse_record_name,
    records_prefix,
    senders,
    sending_prefix,
)
from ckptsync.safe_names import RECORDS
from ckptsync.stores import contract
from ckptsync.stores.clock import wait_until_visible
from ckptsync.stores.contract import Entry, Store

IDLE = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Orphan:
    """An orphaned file; ``run``, ``checkpoint`` and ``location`` are empty for a draft.

    ``records``: names of all records of the checkpoint when the file was found.
    """

    entry: Entry
    run: str = ""
    checkpoint: str = ""
    records: frozenset[str] = frozenset()
    location: str = ""


def find_orphans(store: Store, now: float, run: str = "") -> Iterator[Orphan]:
    """Yield all orphaned files of a run, or of the store if ``run`` is empty.

    They are files in announced or recorded locations that no record names and whose mtime is more
    than `IDLE` seconds before ``now``, on the store's clock; files of a model only if it has a
    model record. With an empty ``run`` abandoned drafts follow. A checkpoint is passed over if a
    node sends it, or if one of its records cannot be read; so is a location with another run's
    records in it. The store is listed, and all records are read, before the first. Raise
    StoreError.
    """
    entries = list(store.names(f"{run}/" if run else ""))
    listed = record_names(e.name for e in entries)
    records, faults = read_checkpoint_records(store, {e.name: e.size for e in entries})
    busy = {(f.run, checkpoint_of(f.location)) for f in faults} | senders(entries, now).keys()
    for location_run, location in sorted(_list_locations(entries)):
        name = (location_run, checkpoint_of(location))
        if name in busy:
            continue
        try:
            check_alone(store, location_run, location)
        except (ConfigError, Corrupt):  # another run's files, or records, may lie there
            continue
        stored_manifests = collect_manifests(
            {n: r for n, r in records.items() if (r.run, r.checkpoint) == name}
        )
        manifests = [
            k.manifest for k in live_manifests(stored_manifests) if k.manifest.location == location
        ]
        named_files = {m.stored_name(file) for m in manifests for file in m.files}
        models = [
            r
            for r in records.values()
            if isinstance(r, ModelRecord) and (r.run, r.location) == (location_run, location)
        ]
        own, of_records, model_prefix = own_prefixes(location_run, location)
        named_files |= {model_prefix + file.path for model in models for file in model.files}
        # without a record, a consolidated model is on its way, whichever head began it
        prefixes = (own, f"{of_records}files/", *([model_prefix] if models else []))
        of_checkpoint = frozenset(
            n for n, p in listed.items() if (p.run, checkpoint_of(p.location)) == name
        )
        for e in entries:
            is_ours = e.name.startswith(prefixes) and e.name not in named_files
            if is_ours and now - e.mtime > IDLE:
                yield Orphan(e, *name, of_checkpoint, location)
    if not run:
        yield from (Orphan(entry) for entry in contract.abandoned_drafts(store, now))


def delete_orphans(
    store: Store,
    orphans: Iterable[Orphan],
    now: float,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[Orphan]:
    """Delete orphaned files, while the caller iterates; yield each that is deleted.

    It first waits `Store.late` seconds, and lists the checkpoint's records again before each
    deletion. A file is left if a node announces an upload of its checkpoint by now, or if names of
    records came or went since it was found; a draft if its writer holds it. ``now``: seconds on the
    store's clock. Raise StoreError.
    """
    wait_until_visible(store, wait)
    for orphan in orphans:
        if not orphan.run:
            if contract.remove_draft(store, orphan.entry.name):
                yield orphan
            continue
        if senders(store.names(sending_prefix(orphan.run, orphan.checkpoint)), now):
            continue
        # After that: a node announces its upload until its manifest is there.
        listed = (
            entry.name
            for location in store.dirs(f"{orphan.run}/{RECORDS}/", orphan.checkpoint)
            if checkpoint_of(location) == orphan.checkpoint
            for entry in store.names(records_prefix(orphan.run, location))
        )
        if record_names(listed).keys() == orphan.records:
            store.delete(checked_own(orphan.entry.name, own_prefixes(orphan.run, orphan.location)))
            yield orphan


def _list_locations(entries: Iterable[Entry]) -> set[tuple[str, str]]:
    """Return the (run, location) pairs that have a record, or an announcement of an upload."""
    locations: set[tuple[str, str]] = set()
    for entry in entries:
        run, _, path = entry.name.partition(f"/{RECORDS}/")
        location, _, below = path.partition("/")
        if (parsed := parse_record_name(entry.name)) is not None:
            locations.add((parsed.run, parsed.location))
        elif below.startswith("sending/"):
            locations.add((run, location))
    return locations
