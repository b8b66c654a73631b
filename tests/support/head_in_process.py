"""The work of a head and of a verifier, done in this process: `ckptsync run` has child processes do
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.uncached import StoreState, read_state
from ckptsync.errors import CkptsyncError
from ckptsync.head.consolidate import HeadOptions, WrittenModel, consolidate_location
from ckptsync.head.due_jobs import VerifyPolicy, verify_jobs_in_store
from ckptsync.merger.plan import MergeResources
from ckptsync.records.report import Report
from ckptsync.stores.contract import Store
from ckptsync.verifier.verification import VerifyOptions
from tests.support.scheduled_verification import verify_scheduled

BASE_OPTIONS = HeadOptions()


@dataclass(frozen=True, slots=True)
class Failed:
    run: str
    location: str
    error: CkptsyncError


@dataclass(frozen=True, slots=True)
class Consolidated:
    """``catalogue`` is what the work began with: what it ``made`` is not in it."""

    made: tuple[WrittenModel, ...]
    failed: tuple[Failed, ...]
    catalogue: StoreState


def consolidate_due(
    store: Store, options: HeadOptions = BASE_OPTIONS, *, statistics: bool = False
) -> Consolidated:
    """Do what is due of every location; one location's failure stops no other."""
    catalogue = read_state(store)
    work = MergeResources(statistics=statistics)
    made: list[WrittenModel] = []
    failed: list[Failed] = []
    for seen in catalogue.readable:
        try:
            made += consolidate_location(store, seen.run, seen.location, options, work=work)
        except CkptsyncError as e:  # noqa: PERF203 - a few locations, each for itself
            failed.append(Failed(seen.run, seen.location, e))
    return Consolidated(tuple(made), tuple(failed), catalogue)


def verify_next(store: Store, policy: VerifyPolicy, now: float) -> Report | None:
    """Verify the location that is due most, and write its report."""
    for job in verify_jobs_in_store(store, read_catalogue(store), policy, now):
        options = VerifyOptions(job.level or "digest", now)
        if verified := verify_scheduled(store, job.run, job.location, options):
            return verified[0]
    return None
