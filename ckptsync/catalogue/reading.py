"""What a store holds, place by place, in short: names are listed each time, and read is only what has changed.

Every time: the names of all records, and those of the files of places that wait for some.  That files which were there once still are is for the verifier to
prove, who looks at them (`fresh`); so nothing that deletes or overwrites may rest on what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptsync.catalogue.lost import explained
from ckptsync.catalogue.summary import Catalogue
from ckptsync.catalogue.units import Found, Name, Unit, grouped, is_settled, key, renewed
from ckptsync.records.names import OURS
from ckptsync.records.places import reading_order
from ckptsync.stores.contract import Entry, Store
from ckptsync.stores.slices import cuts_of, joined, pieces

AT_ONCE = 8  # requests: a distant server is waited for


@dataclass(slots=True)
class Cache:
    """What was read before, of one store.  Records never change under a name, so nothing here is out of date; losing it costs reading again.

    ``is_new``: something in it was not there before.
    """

    units: dict[Name, Unit] = field(default_factory=dict)
    cuts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_new: bool = field(default=False, compare=False)

    def remember(self, name: Name, unit: Unit) -> None:
        """It is as it was read."""
        self.units[name], self.is_new = unit, True

    def forget(self, name: Name) -> None:
        """It is no more, or cannot be read."""
        self.is_new |= self.units.pop(name, None) is not None


def read(store: Store, cache: Cache | None = None, run: str = "") -> Catalogue:
    """All of ``run``, or of the store.  Raises StoreError; what is wrong with one record is a `Fault`.

    Whatever was read before an error is remembered, so that the next call goes on there.
    """
    cache = cache or Cache()
    runs = [run] if run else [found for found in store.dirs("") if found != OURS]
    with _pool() as pool:
        listed = _listed(store, runs, cache, pool)
        units = {name: entries for run, entries in listed.items() for name, entries in grouped(run, entries).items()}
        for name in [name for name in cache.units if name not in units and run in ("", name[0])]:
            cache.forget(name)
        found = dict(_renewed(store, units, cache, pool))
    return _catalogue(found.values(), (e.mtime for entries in listed.values() for e in entries))


@contextmanager
def _pool() -> Iterator[Executor]:
    """Threads that are not waited for longer than their present request once anything has failed."""
    with ThreadPoolExecutor(AT_ONCE, "catalogue") as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _listed(store: Store, runs: Sequence[str], cache: Cache, pool: Executor) -> dict[str, list[Entry]]:
    """Run → what lies below its records; a long run in pieces, all runs at once."""
    asked = {run: [pool.submit(p) for p in pieces(store, f"{run}/{OURS}/", cache.cuts.get(run, ()))] for run in runs}
    found = {run: joined(part.result() for part in parts) for run, parts in asked.items()}
    cache.cuts = {**cache.cuts, **{run: cuts_of(entries) for run, entries in found.items() if entries}}
    return found


def _renewed(store: Store, units: Mapping[Name, list[Entry]], cache: Cache, pool: Executor) -> Iterator[tuple[Name, Found]]:
    old = {name: unit for name in units if (unit := cache.units.get(name))}
    same = {name for name, unit in old.items() if is_settled(unit) and unit.key == key(units[name])}
    yield from ((name, Found(old[name])) for name in same)
    rest = [name for name in units if name not in same]
    for name, found in zip(rest, pool.map(lambda name: renewed(store, units[name], old.get(name)), rest), strict=True):
        if found.is_passing:
            cache.forget(name)
        elif found.unit is not old.get(name):
            cache.remember(name, found.unit)
        yield name, found


def _catalogue(found: Iterable[Found], mtimes: Iterable[float]) -> Catalogue:
    units = list(found)
    summaries = [summary for f in units for summary in f.unit.summaries]
    faults = sorted((fault for f in units for fault in f.faults), key=lambda fault: fault.name)
    clock = max((*mtimes, *(f.unit.newest for f in units)), default=0.0)
    return Catalogue(explained(sorted(summaries, key=lambda s: reading_order(s.run, s.place))), tuple(faults), clock)
