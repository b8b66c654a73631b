"""What of a store waits to be verified.  Imports none of what verifies: a head asks often, and leaves the rest to its children."""

from __future__ import annotations

from ckptsync.catalogue.fresh import fresh_location
from ckptsync.catalogue.shortened import summary
from ckptsync.catalogue.summary import Catalogue, Summary
from ckptsync.errors import Unsupported
from ckptsync.records.coding import is_made_anew
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Due, Schedule, due


def waiting(store: Store, catalogue: Catalogue, schedule: Schedule, now: float) -> tuple[Due, ...]:
    """All that are due, also the locations of which nothing is said because a record of theirs is damaged: that is for a report to say.

    Ages count on the store's clock, which stands at its newest file's mtime at least; ``now`` moves it on where nothing writes.  Raises StoreError.
    """
    newer = {(f.run, f.location) for f in catalogue.faults if isinstance(f.error, Unsupported)}
    hidden = sorted({(f.run, f.location) for f in catalogue.faults if not is_made_anew(f.record, f.error)} - newer)
    locations = (*catalogue.summaries, *(found for where in hidden if (found := _hidden(store, *where))))
    return due(locations, schedule, max(now, catalogue.clock))


def _hidden(store: Store, run: str, location: str) -> Summary | None:
    found = fresh_location(store, run, location)
    seen = found.of(run, location)
    return summary(seen, found.mtimes) if seen else None
