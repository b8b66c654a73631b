"""The verifier's tick: look once at the store, verify the one place that is due most, write its report last."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptsync.catalogue.fresh import Fresh, fresh_place
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Incomplete
from ckptsync.records.report import Level, Report
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Schedule
from ckptsync.verify.place import verify_place
from ckptsync.verify.reading import Told
from ckptsync.verify.reporting import write_report
from ckptsync.verify.waiting import waiting


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
    """Verify at most one place.  ``now`` is seconds since the epoch on this machine.  Raises StoreError, and then nothing is reported."""
    catalogue = read(store)
    todo = waiting(store, catalogue, schedule, now)
    for i, next_ in enumerate(todo):
        result = one(store, next_.place.run, next_.place.place, next_.level, now)
        if result.report:
            others = tuple(f"{d.place.run}/{d.place.place}" for d in (*todo[:i], *todo[i + 1 :]))
            return replace(result, waiting=others, faults=catalogue.faults)
    return VerifyResult(None, "", tuple(f"{d.place.run}/{d.place.place}" for d in todo), catalogue.faults)


def one(store: Store, run: str, place: str, level: Level, now: float, *, told: Told = lambda _: None) -> VerifyResult:
    """Verify this place as it is now, and write the report; raises StoreError, and then nothing is reported.  Nothing of one that has gone.

    ``told`` hears of bytes as they are read, and of 0 of them while a child process is at work.
    """
    found = fresh_place(store, run, place)
    seen = found.of(run, place)
    if newer := found.newer(run, place):
        raise newer
    report = _verified(store, seen, level, found, now, told=told) if seen else None
    return VerifyResult(report, write_report(store, report) if report else "", (), found.faults)


def _verified(store: Store, seen: Snapshot, level: Level, found: Fresh, now: float, *, told: Told) -> Report | None:
    try:
        return verify_place(store, seen, level, found.faults_of(seen.run, seen.place), now, told=told)
    except Incomplete:
        return None  # it changed meanwhile: the next tick sees what it has become
