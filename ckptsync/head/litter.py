"""What nothing in a store speaks of any more: files that no record names, copies that have served their time, drafts that killed writers left.

A file is litter only where we wrote before, and can know: in the directories of locations that records, or a node's word that it sends, name; where every
record can be read; when nobody has written it for `idle`, and nobody says that he sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptsync.catalogue.fresh import read_checkpoints
from ckptsync.errors import ConfigError
from ckptsync.head.clearing import check_alone
from ckptsync.records.locations import record_names
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.names import OURS, consolidated_prefix, parse_record_name, records_prefix
from ckptsync.records.saves import Known, known_of, live
from ckptsync.stores import capabilities
from ckptsync.stores.contract import Entry, Store

IDLE = 24 * 3600.0
SENDING = 15 * 60.0
_SAYS = "sending/"


@dataclass(frozen=True, slots=True)
class Litter:
    """``checkpoint``: of which run and name it was; both empty for a draft.  ``records``: names of all of that checkpoint, when it was found."""

    entry: Entry
    run: str = ""
    checkpoint: str = ""
    records: frozenset[str] = frozenset()


def found(store: Store, now: float, idle: float = IDLE, run: str = "") -> Iterator[Litter]:
    """All of it.  ``now``: seconds on the store's clock.  Raises StoreError."""
    entries = list(store.names(f"{run}/" if run else ""))
    listed = record_names(e.name for e in entries)
    records, faults = read_checkpoints(store, {e.name: e.size for e in entries})
    doubtful = {(f.run, f.location.partition("~")[0]) for f in faults}
    model_records = [r for r in records.values() if isinstance(r, ModelRecord)]
    for where, location in sorted(_locations(entries)):
        checkpoint = location.partition("~")[0]
        if (where, checkpoint) in doubtful or _is_sent(entries, where, checkpoint, now) or not _is_alone(store, where, location):
            continue
        known = known_of({name: r for name, r in records.items() if (r.run, r.checkpoint) == (where, checkpoint)})
        bound = {*_bound(location, known), *_consolidated(s for s in model_records if (s.run, s.location) == (where, location))}
        said = frozenset(n for n, p in listed.items() if (p.run, p.location.partition("~")[0]) == (where, checkpoint))
        looked_at = _prefixes(
            where, location, has_model_record=any((s.run, s.location) == (where, location) for s in model_records)
        )
        for entry in entries:
            is_here = any(entry.name.startswith(prefix) for prefix in looked_at)
            if is_here and entry.name not in bound and now - entry.mtime > idle:
                yield Litter(entry, where, checkpoint, said)
    if not run:
        yield from (Litter(entry) for entry in capabilities.given_up(store, now))


def remove(store: Store, litter: Iterable[Litter], now: float, *, wait: Callable[[float], object] = time.sleep) -> Iterator[Litter]:
    """Each that is gone now.  Nothing of a checkpoint of which somebody says by now that he sends, or whose records have changed.  Raises StoreError."""
    if store.late:
        wait(store.late)  # only then what others had written before must be seen here
    for one in litter:
        if not one.run:
            if capabilities.drop(store, one.entry.name):
                yield one
            continue
        said = store.names(f"{records_prefix(one.run, one.checkpoint)}{_SAYS}")
        if any(e.size and now - e.mtime < SENDING for e in said):
            continue
        # after that: who has sent it since says so until his manifest is there
        if _records(store, one.run, one.checkpoint) == one.records:
            store.delete(one.entry.name)
            yield one


def _records(store: Store, run: str, checkpoint: str) -> frozenset[str]:
    """Names of all of a checkpoint's, in whatever location of its name."""
    locations = [p for p in store.dirs(f"{run}/{OURS}/", checkpoint) if p.partition("~")[0] == checkpoint]
    return frozenset(record_names(e.name for location in locations for e in store.names(records_prefix(run, location))))


def _locations(entries: Iterable[Entry]) -> set[tuple[str, str]]:
    """Of which there is any record, or of which a node said once that it sends."""
    named: set[tuple[str, str]] = set()
    for entry in entries:
        parsed = parse_record_name(entry.name)
        run, _, rest = entry.name.partition(f"/{OURS}/")
        if parsed:
            named.add((parsed.run, parsed.location))
        elif rest.partition("/")[2].startswith(_SAYS):
            named.add((run, rest.partition("/")[0]))
    return named


def _is_sent(entries: Iterable[Entry], run: str, checkpoint: str, now: float) -> bool:
    prefix = f"{records_prefix(run, checkpoint)}{_SAYS}"
    return any(e.name.startswith(prefix) and e.size and now - e.mtime < SENDING for e in entries)


def _is_alone(store: Store, run: str, location: str) -> bool:
    try:
        check_alone(store, run, location)
    except ConfigError:  # another run lies in it: whose a file is cannot be told
        return False
    return True


def _bound(location: str, known: Iterable[Known]) -> Iterator[str]:
    """Yield the names of the stored files that the manifests of a location name."""
    for k in live(known):
        if k.manifest.location == location:
            yield from map(k.manifest.stored_name, k.manifest.files)


def _consolidated(model_records: Iterable[ModelRecord]) -> Iterator[str]:
    return (consolidated_prefix(s.run, s.location) + f.path for s in model_records for f in s.files)


def _prefixes(run: str, location: str, *, has_model_record: bool) -> tuple[str, ...]:
    """Before it is consolidated, a consolidated model is on its way, whoever began it."""
    own = (f"{run}/{location}/", f"{records_prefix(run, location)}files/")
    return (*own, consolidated_prefix(run, location)) if has_model_record else own
