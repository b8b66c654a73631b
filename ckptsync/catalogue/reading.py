"""What a store holds, place by place, in short: names are listed each time, and read is only what has changed.

Every time: the names of all records, and those of the files of places that are neither VERIFIED, RETIRED nor AMBIGUOUS.  That a verified place's files are
still there is for the verifier to prove, who looks at them (`fresh`); so nothing that deletes or overwrites may rest on what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptsync.catalogue.lost import explained
from ckptsync.catalogue.summary import Catalogue
from ckptsync.catalogue.units import Found, Name, Unit, grouped, renewed
from ckptsync.records.names import OURS
from ckptsync.records.places import reading_order
from ckptsync.stores.contract import Store

AT_ONCE = 8  # requests: a distant server is waited for


@dataclass(slots=True)
class Cache:
    """What was read before, of one store.  Records never change under a name, so nothing here is out of date; losing it costs reading again."""

    units: dict[Name, Unit] = field(default_factory=dict)


def read(store: Store, cache: Cache | None = None, run: str = "") -> Catalogue:
    """All of ``run``, or of the store.  Raises StoreError; what is wrong with one record is a `Fault`."""
    cache = cache or Cache()
    runs = [run] if run else [found for found in store.dirs("") if found != OURS]
    with ThreadPoolExecutor(AT_ONCE, "catalogue") as pool:
        listed = dict(zip(runs, pool.map(lambda run: list(store.names(f"{run}/{OURS}/")), runs), strict=True))
        units = {name: entries for run, entries in listed.items() for name, entries in grouped(run, entries).items()}
        old = cache.units
        found = dict(zip(units, pool.map(lambda name: renewed(store, units[name], old.get(name)), units), strict=True))
    _remember(cache, found, run)
    return _catalogue(found.values(), (e.mtime for entries in listed.values() for e in entries))


def _remember(cache: Cache, found: dict[Name, Found], run: str) -> None:
    others = {name: unit for name, unit in cache.units.items() if run and name[0] != run}
    cache.units = others | {name: f.unit for name, f in found.items() if not f.is_passing}


def _catalogue(found: Iterable[Found], mtimes: Iterable[float]) -> Catalogue:
    units = list(found)
    summaries = [summary for f in units for summary in f.unit.summaries]
    faults = sorted((fault for f in units for fault in f.faults), key=lambda fault: fault.name)
    clock = max((*mtimes, *(f.unit.newest for f in units)), default=0.0)
    return Catalogue(explained(sorted(summaries, key=lambda s: reading_order(s.run, s.place))), tuple(faults), clock)
