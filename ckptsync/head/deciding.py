"""What the head has to do about a location.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptsync.records.names import CONSOLIDATED, consolidated_prefix
from ckptsync.records.state import Snapshot

Deed = Literal["consolidate", "mend", "complete", "nothing"]


@dataclass(frozen=True, slots=True)
class Task:
    """``mend``: ``files`` of the consolidated model are missing, or a report calls them damaged; each is looked at before it is written.

    ``complete``: it is consolidated and whole, but configuration may have come that was not there then.
    """

    deed: Deed
    files: tuple[str, ...] = ()


def task(snapshot: Snapshot) -> Task:
    """Damage to the shards holds nothing up: the bytes that are read are checked, and those that are not read do not matter."""
    conditions = snapshot.conditions
    if conditions.retired or conditions.ambiguous:
        return Task("nothing")
    if snapshot.model_record is None:
        return Task("consolidate" if conditions.model.holds else "nothing")
    suspects = tuple(sorted(_unlisted(snapshot) | _damaged(snapshot)))
    if suspects:
        return Task("mend", suspects)
    return Task("complete")


def _unlisted(snapshot: Snapshot) -> set[str]:
    assert snapshot.model_record is not None
    prefix = consolidated_prefix(snapshot.run, snapshot.location)
    return {f.path for f in snapshot.model_record.files if snapshot.sizes.get(prefix + f.path) != f.size}


def _damaged(snapshot: Snapshot) -> set[str]:
    """Names that reports which nobody has answered complain of, among those that the model record binds."""
    assert snapshot.model_record is not None
    prefix = f"{CONSOLIDATED}/{snapshot.location}/"
    reports = (snapshot.records.reports[name] for name in snapshot.conditions.proof.damage)
    named = {f.name.removeprefix(prefix) for r in reports for f in r.findings if f.kind not in ("note", "nonfinite")}
    return named & {f.path for f in snapshot.model_record.files}
