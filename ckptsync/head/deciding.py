"""What the head has to do about a place.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.records.names import CONSOLIDATED, consolidated_prefix
from ckptsync.records.state import Snapshot

RETRY = 60.0
"""Seconds until a store or network error is tried again: they pass by themselves."""
RETRY_PERMANENT = 3600.0
"""Seconds until anything else is: bytes, layouts and options stay as they are, unless somebody mends them without a record of it."""

Place = tuple[str, str]
Deed = Literal["consolidate", "mend", "complete", "nothing"]


@dataclass(frozen=True, slots=True)
class Task:
    """``mend``: ``files`` of the consolidated model are missing, or a report calls them damaged; each is looked at before it is written.

    ``complete``: it is sealed and whole, but configuration may have come that was not there then.
    """

    deed: Deed
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong with a place in its state then (`state_key`), and when to try the same again."""

    error: CkptsyncError
    key: frozenset[str]
    retry_at: float


def task(snapshot: Snapshot) -> Task:
    """Damage to the shards holds nothing up: the bytes that are read are checked, and those that are not read do not matter."""
    facets = snapshot.facets
    if facets.retired or facets.ambiguous:
        return Task("nothing")
    if snapshot.seal is None:
        return Task("consolidate" if facets.model.holds else "nothing")
    suspects = tuple(sorted(_unlisted(snapshot) | _damaged(snapshot)))
    if suspects:
        return Task("mend", suspects)
    return Task("nothing" if facets.shards else "complete")


def state_key(snapshot: Snapshot) -> frozenset[str]:
    """Changes with anything that could make a failed task succeed, but for a repair that nobody has reported on yet."""
    records = snapshot.records
    return frozenset((*(k.name for k in snapshot.manifests), *records.seals, *records.reports))


def failed(error: CkptsyncError, snapshot: Snapshot, now: float) -> Failure:
    """``now`` in seconds on any clock of this process."""
    wait = RETRY if isinstance(error, StoreError) else RETRY_PERMANENT
    return Failure(error, state_key(snapshot), now + wait)


def is_due(snapshot: Snapshot, failures: Mapping[Place, Failure], now: float) -> bool:
    """Whether a place that failed before may be tried again; true for every other."""
    before = failures.get((snapshot.run, snapshot.place))
    return before is None or before.key != state_key(snapshot) or now >= before.retry_at


def _unlisted(snapshot: Snapshot) -> set[str]:
    assert snapshot.seal is not None
    prefix = consolidated_prefix(snapshot.run, snapshot.place)
    return {f.path for f in snapshot.seal.files if snapshot.sizes.get(prefix + f.path) != f.size}


def _damaged(snapshot: Snapshot) -> set[str]:
    """Names that reports which nobody has answered complain of, among those that the seal binds."""
    assert snapshot.seal is not None
    prefix = f"{CONSOLIDATED}/{snapshot.place}/"
    reports = (snapshot.records.reports[name] for name in snapshot.facets.proof.damage)
    named = {f.name.removeprefix(prefix) for r in reports for f in r.findings if f.kind not in ("note", "nonfinite")}
    return named & {f.path for f in snapshot.seal.files}
