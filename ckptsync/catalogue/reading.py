"""What a store holds, place by place, in short: listed again each time, and read only where something is new."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Catalogue
from ckptsync.stores.contract import Store


@dataclass(slots=True)
class Cache:
    """What was read before.  Losing it costs reading again, and nothing else."""

    last: Catalogue = field(default_factory=Catalogue)


def read(store: Store, cache: Cache | None = None, run: str = "") -> Catalogue:
    """All of ``run``, or of the store.  Raises StoreError; what is wrong with one record is a `Fault`."""
    found = fresh(store, run)
    summaries = tuple(summary(s, found.mtimes) for s in found.readable)
    cache = cache or Cache()
    cache.last = Catalogue(summaries, found.faults, max(found.mtimes.values(), default=0.0))
    return cache.last
