"""What of a store waits to be verified.  Imports none of what verifies: a head asks often, and leaves the rest to its children."""

from __future__ import annotations

from ckptsync.catalogue.fresh import fresh_place
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.errors import Unsupported
from ckptsync.records.coding import is_made_anew
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Due, Schedule, due


def waiting(store: Store, catalogue: Catalogue, schedule: Schedule, now: float) -> tuple[Due, ...]:
    """All that are due, also the places of which nothing is said because a record of theirs is damaged: that is for a report to say.

    Ages count on the store's clock, which stands at its newest file's mtime at least; ``now`` moves it on where nothing writes.  Raises StoreError.
    """
    newer = {(f.run, f.place) for f in catalogue.faults if isinstance(f.error, Unsupported)}
    hidden = sorted({(f.run, f.place) for f in catalogue.faults if not is_made_anew(f.record, f.error)} - newer)
    places = (*catalogue.summaries, *(found for where in hidden if (found := _hidden(store, *where))))
    return due(places, schedule, max(now, catalogue.clock))


def _hidden(store: Store, run: str, place: str) -> Summary | None:
    found = fresh_place(store, run, place)
    seen = found.of(run, place)
    return summary(seen, found.mtimes) if seen else None
