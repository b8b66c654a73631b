"""Checkpoint by checkpoint: what decides together is read together, and judged by its records and, unless it is finished, by the files that are there.  Pure.

Files that were there as named are not listed again while no record changes: that they stay is the verifier's to prove.

Manifests of one checkpoint's name decide together over all of its locations (`records.saves`), and locations of one checkpoint begin with its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptsync.catalogue.fresh import hidden_by, read_checkpoints
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Fault, Summary
from ckptsync.digest import digest
from ckptsync.records.coding import Record
from ckptsync.records.locations import record_names, snapshots
from ckptsync.records.names import OURS, consolidated_prefix
from ckptsync.records.state import Snapshot, Status
from ckptsync.stores.contract import Entry, Store

Name = tuple[str, str]
"""A run, and what the names of all locations of a checkpoint begin with."""
SETTLED: frozenset[Status] = frozenset({"VERIFIED", "RETIRED", "CONFLICT"})
"""Words of locations whose files need not be listed: that they are there is the verifier's to prove, or does not matter."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What was found of a checkpoint's locations.

    ``key`` is of its records' listing, ``data`` of that of the files below ``open``: those of locations that wait for some, as they came or when they are
    mended.  ``newest``: the newest mtime of files when they were listed.
    """

    key: str
    summaries: tuple[Summary, ...]
    open: tuple[str, ...] = ()
    data: str = ""
    newest: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """``unit`` may be remembered unless ``is_passing``: a record could not be read, or went meanwhile."""

    unit: Unit
    faults: tuple[Fault, ...] = ()
    is_passing: bool = False


def name_of(run: str, location: str) -> Name:
    """The unit that a location belongs to."""
    return run, location.partition("~")[0]


def grouped(run: str, entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """What lies below a run's records, by the unit it belongs to; without what nodes say while they send."""
    found: dict[Name, list[Entry]] = {}
    start = len(f"{run}/{OURS}/")
    for entry in entries:
        location, _, rest = entry.name[start:].partition("/")
        if rest and not rest.startswith("sending/"):
            found.setdefault(name_of(run, location), []).append(entry)
    return found


def key(entries: Iterable[Entry]) -> str:
    """A digest of a listing, in whatever order: equal keys are equal names, sizes and times."""
    return digest("".join(sorted([f"{e.name}\n{e.size} {e.mtime}\n" for e in entries])).encode())


def is_finished(unit: Unit) -> bool:
    """Whether its records' listing tells whether anything has changed."""
    return not unit.open


def renewed(store: Store, entries: list[Entry], old: Unit | None) -> Found:
    """A unit as it is now; ``old`` itself where nothing has changed.  ``entries``: its own of `grouped`.  Raises StoreError."""
    now = key(entries)
    if old is not None and old.key == now and (is_finished(old) or key(_data(store, old.open)) == old.data):
        return Found(old)
    names = record_names(entry.name for entry in entries)
    records, faults = read_checkpoints(store, {e.name: e.size for e in entries})
    hidden = hidden_by(faults)
    sizes, unsettled = _trusted(records, hidden)
    data = list(_data(store, unsettled))
    sizes.update((e.name, e.size) for e in (*entries, *data))
    seen = snapshots(records, sizes, hidden)
    mtimes = {e.name: e.mtime for e in (*entries, *data)}
    open_ = tuple(prefix for s in seen if s.status not in SETTLED and waits(s) for prefix in _prefixes(s))
    awaited = key(e for e in data if e.name.startswith(open_))
    unit = Unit(now, tuple(summary(s, mtimes) for s in seen), open_, awaited, max((e.mtime for e in data), default=0.0))
    return Found(unit, faults, bool(faults) or len(records) < len(names))


def waits(seen: Snapshot) -> bool:
    """Whether a file may come, or be mended, without a record of it."""
    return seen.status == "DAMAGED" or any(seen.sizes.get(name) != size for name, size in named(seen))


def _trusted(records: Mapping[str, Record], hidden: Collection[tuple[str, str]]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Name → size of the files of finished locations, taken at their records' word; and the prefixes of the others, whose files have to be listed."""
    bare = snapshots(records, {}, hidden)
    sizes = {name: size for seen in bare if _may_be_finished(seen) for name, size in named(seen)}
    finished = {s.location: s for s in (snapshots(records, sizes, hidden) if sizes else bare) if s.status in SETTLED}
    kept = {name: size for seen in finished.values() for name, size in named(seen)}
    return kept, tuple(prefix for seen in bare if seen.location not in finished for prefix in _prefixes(seen))


def _may_be_finished(seen: Snapshot) -> bool:
    return seen.conditions.proof.holds or bool(seen.conditions.retired or seen.conditions.ambiguous)


def named(seen: Snapshot) -> Iterator[tuple[str, int]]:
    """Store name and bytes of every file that its records say is there."""
    if not seen.conditions.shards:
        yield from ((at.name, at.entry.size) for where in seen.files.values() for at in where)
    if seen.model_record:
        prefix = consolidated_prefix(seen.run, seen.location)
        yield from ((prefix + file.path, file.size) for file in seen.model_record.files)


def _prefixes(seen: Snapshot) -> Iterator[str]:
    yield f"{seen.run}/{seen.location}/"
    if seen.model_record:
        yield consolidated_prefix(seen.run, seen.location)


def _data(store: Store, prefixes: Iterable[str]) -> Iterator[Entry]:
    for prefix in prefixes:
        yield from store.names(prefix)
