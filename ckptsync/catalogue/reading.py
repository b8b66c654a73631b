"""What a store holds, location by location, in short: names are listed each time, and read is only what has changed.

Every time: the names of all records, and those of the files of locations that wait for some.  That files which were there once still are is for the verifier to
prove, who looks at them (`fresh`); so nothing that deletes or overwrites may rest on what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptsync.catalogue.lost import explained
from ckptsync.catalogue.summary import Catalogue
from ckptsync.catalogue.units import Found, Name, Unit, grouped, is_finished, key, renewed
from ckptsync.collector import paused
from ckptsync.records.locations import reading_order
from ckptsync.records.names import OURS
from ckptsync.stores.capabilities import cuts_of, joined, pieces
from ckptsync.stores.contract import Entry, Store

AT_ONCE = 8  # requests: a distant server is waited for


@dataclass(slots=True)
class Cache:
    """What was read before, of one store.  Records never change under a name, so nothing here is out of date; losing it costs reading again.

    ``is_new``: something in it was not there before.  ``packed`` gives units that are not among ``units`` yet: unpacking them takes as long as a server needs to
    list, and is done meanwhile.
    """

    units: dict[Name, Unit] = field(default_factory=dict)
    cuts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_new: bool = field(default=False, compare=False)
    packed: Callable[[], Mapping[Name, Unit]] | None = field(default=None, compare=False)

    def unpack(self) -> None:
        """Have all of it in ``units``."""
        if self.packed:
            self.units = {**self.packed(), **self.units}
            self.packed = None

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
        found, rest, newest = _compared(_listed(store, runs, cache, pool), cache)
        for name in [name for name in cache.units if name not in found and name not in rest and run in ("", name[0])]:
            cache.forget(name)
        found.update(_renewed(store, rest, cache, pool))
    return _catalogue(found.values(), newest)


@contextmanager
def _pool() -> Iterator[Executor]:
    """Threads that are not waited for longer than their present request once anything has failed."""
    with ThreadPoolExecutor(AT_ONCE, "catalogue") as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _listed(store: Store, runs: Sequence[str], cache: Cache, pool: Executor) -> Iterator[tuple[str, list[Entry]]]:
    """Each run, and what lies below its records; all are asked for at once, a long run in pieces, and each is given out as it comes."""
    asked = {run: [pool.submit(p) for p in pieces(store, f"{run}/{OURS}/", cache.cuts.get(run, ()))] for run in runs}
    cache.unpack()
    for run, parts in asked.items():
        entries = joined(part.result() for part in parts)
        if entries:
            cache.cuts[run] = cuts_of(entries)
        yield run, entries


def _compared(listed: Iterable[tuple[str, list[Entry]]], cache: Cache) -> tuple[dict[Name, Found], dict[Name, list[Entry]], float]:
    """What was read before, the listing of what was not or has changed, and the newest mtime; each run as it comes."""
    found: dict[Name, Found] = {}
    rest: dict[Name, list[Entry]] = {}
    newest = 0.0
    with paused():
        for run, entries in listed:
            newest = max(newest, max((e.mtime for e in entries), default=0.0))
            units = grouped(run, entries)
            same = {name: old for name, its in units.items() if (old := _same(cache.units.get(name), its))}
            found.update(same)
            rest.update((name, its) for name, its in units.items() if name not in same)
    return found, rest, newest


def _same(old: Unit | None, entries: Sequence[Entry]) -> Found | None:
    """What was read before, if that it is the same shows without another request."""
    return Found(old) if old and is_finished(old) and old.key == key(entries) else None


def _renewed(store: Store, units: Mapping[Name, list[Entry]], cache: Cache, pool: Executor) -> Iterator[tuple[Name, Found]]:
    old = cache.units
    for name, found in zip(units, pool.map(lambda name: renewed(store, units[name], old.get(name)), units), strict=True):
        if found.is_passing:
            cache.forget(name)
        elif found.unit is not old.get(name):
            cache.remember(name, found.unit)
        yield name, found


def _catalogue(found: Iterable[Found], newest: float) -> Catalogue:
    units = list(found)
    summaries = [summary for f in units for summary in f.unit.summaries]
    faults = sorted((fault for f in units for fault in f.faults), key=lambda fault: fault.name)
    clock = max((newest, *(f.unit.newest for f in units)))
    return Catalogue(explained(sorted(summaries, key=lambda s: reading_order(s.run, s.location))), tuple(faults), clock)
