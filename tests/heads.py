"""The work of a head and of a verifier, done in this process: `ckptsync run` has child processes do it."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.catalogue.fresh import Fresh, fresh
from ckptsync.catalogue.reading import read
from ckptsync.errors import CkptsyncError
from ckptsync.head.consolidate import HeadOptions, one
from ckptsync.head.sealing import Made
from ckptsync.stores.contract import Store
from ckptsync.verify.due import Schedule
from ckptsync.verify.location import VerifyResult, verify_and_report
from ckptsync.verify.waiting import waiting

BASE_OPTIONS = HeadOptions()


@dataclass(frozen=True, slots=True)
class Failed:
    run: str
    location: str
    error: CkptsyncError


@dataclass(frozen=True, slots=True)
class Consolidated:
    """``catalogue`` is what the work began with: what it ``made`` is not in it."""

    made: tuple[Made, ...]
    failed: tuple[Failed, ...]
    catalogue: Fresh


def consolidate_due(store: Store, options: HeadOptions = BASE_OPTIONS) -> Consolidated:
    """Do what is due of every location; one location's failure stops no other."""
    catalogue = fresh(store)
    made: list[Made] = []
    failed: list[Failed] = []
    for seen in catalogue.readable:
        try:
            made += one(store, seen.run, seen.location, options)
        except CkptsyncError as e:  # noqa: PERF203 - a few locations, each for itself
            failed.append(Failed(seen.run, seen.location, e))
    return Consolidated(tuple(made), tuple(failed), catalogue)


def verify_next(store: Store, schedule: Schedule, now: float) -> VerifyResult:
    """Verify the location that is due most, and write its report."""
    for due in waiting(store, read(store), schedule, now):
        result = verify_and_report(store, due.location.run, due.location.location, due.level, now)
        if result.report:
            return result
    return VerifyResult()
