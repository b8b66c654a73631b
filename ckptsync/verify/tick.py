"""The verifier's tick: look once at the store, verify the one place that is due most, write its report last."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.catalogue.fresh import Fresh, fresh, fresh_place
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Incomplete
from ckptsync.records.report import Level, Report
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Due, Schedule, due
from ckptsync.verify.place import verify_place
from ckptsync.verify.reporting import write_report


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """``report`` is what was found, if anything was due, and ``written`` its record's name.

    ``waiting``: places that are due as well, as ``run/place``.  ``faults``: records that cannot be read.
    """

    report: Report | None = None
    written: str = ""
    waiting: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def tick(store: Store, schedule: Schedule, now: float) -> VerifyResult:
    """Verify at most one place.  ``now`` is seconds since the epoch on this machine.  Raises StoreError, and then nothing is reported.

    Ages count on the store's clock, which stands at its newest file's mtime at least; ``now`` moves it on where nothing writes.
    """
    found = fresh(store)
    clock = max(now, *found.mtimes.values(), 0.0)
    todo = [d for d in due(found.places, schedule, found.mtimes, clock) if found.newer(d.place.run, d.place.place) is None]
    for i, next_ in enumerate(todo):
        report = _verified(store, next_, found, now)
        if report:
            written = write_report(store, report)
            waiting = tuple(f"{d.place.run}/{d.place.place}" for d in (*todo[:i], *todo[i + 1 :]))
            return VerifyResult(report, written, waiting, found.faults)
    return VerifyResult(None, "", tuple(f"{d.place.run}/{d.place.place}" for d in todo), found.faults)


def one(store: Store, run: str, place: str, level: Level, now: float) -> VerifyResult:
    """Verify this place as it is now, and write the report; raises StoreError, and then nothing is reported.  Nothing of one that has gone."""
    found = fresh_place(store, run, place)
    seen = found.of(run, place)
    if newer := found.newer(run, place):
        raise newer
    report = _verified(store, Due(seen, level, "never"), found, now) if seen else None
    return VerifyResult(report, write_report(store, report) if report else "", (), found.faults)


def _verified(store: Store, next_: Due, found: Fresh, now: float) -> Report | None:
    seen = next_.place
    try:
        return verify_place(store, seen, next_.level, found.faults_of(seen.run, seen.place), now)
    except Incomplete:
        return None  # it changed meanwhile: the next tick sees what it has become
