"""``ckptsync join``: make two locations that hold parts of one save into one location.

Two nodes that begin at the same time may open two locations for one save, and times alone may not
prove that they belong together.  So a user says it: the command writes a join, the record that the
manifests are of one save, and then moves the files of each node as its worker does, by
`upload.correct_location`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptsync.errors import ConfigError, Incomplete
from ckptsync.records import manifest_groups
from ckptsync.records.io import append_record
from ckptsync.records.save_decisions import Join, Keep, fate, keep_reason
from ckptsync.records.store_paths import checkpoint_of
from ckptsync.stores.contract import Store
from ckptsync.worker.local_save import AfterChunk, LocalFiles, ignore_chunk
from ckptsync.worker.store_view import RunRecords, StoreView
from ckptsync.worker.upload import UploadContext, correct_location


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a join.

    ``location``: of the whole save.  ``moved``: node → the location from which its files came.
    ``is_new``: no record or proof joined them before.
    """

    location: str
    moved: dict[str, str]
    is_new: bool


def join(
    store: Store, run: str, first: str, second: str, after_chunk: AfterChunk = ignore_chunk
) -> Joined:
    """Record that two locations are one save, and copy the files of one beside those of the other.

    A killed call is continued by the next; a finished one does nothing.  Raises ConfigError where
    they cannot be one save, or do not exist; Incomplete while a node sends files of that
    checkpoint; Corrupt or Unsupported for a record of it that cannot be read; StoreError.
    """
    checkpoint = checkpoint_of(first)
    if first == second or checkpoint_of(second) != checkpoint:
        raise ConfigError(
            f"{run}/{first} and {run}/{second} are not two locations of one checkpoint", hint=_LIST
        )
    records = StoreView(store, JOIN_NODE, run).refresh()
    if broken := records.broken_location(checkpoint):
        raise broken
    manifests = records.manifests(checkpoint)
    members = [
        stored for location in (first, second) for stored in _list_members(run, location, manifests)
    ]
    locations = sorted({stored.manifest.location for stored in members} | {first})
    _check_joinable(run, locations, members, records)
    is_new = len(_list_groups(members, records)) > 1
    names = {stored.name for stored in members}
    if is_new:
        joined = [
            replace(stored, joins=stored.joins | {"this"}) if stored.name in names else stored
            for stored in manifests
        ]
        home = manifest_groups.better_location(
            members[0].manifest.node, members[0].manifest.location, joined
        )
        _write_records(store, home, members, records)
    location, moved = _bring_together(store, run, checkpoint, names, after_chunk)
    return Joined(location, moved, is_new)


JOIN_NODE = "~join"
"""Who announces in the store that it sends while files are copied; no node's id holds a ``~``."""
_LIST = "`ckptsync ls` shows which locations may be parts of one save"


def _list_members(
    run: str, location: str, manifests: Sequence[manifest_groups.StoredManifest]
) -> list[manifest_groups.StoredManifest]:
    """Return a location's manifests that count, or those that replaced them in an earlier join.

    Raises ConfigError if the location has no manifest.
    """
    names = {stored.name for stored in manifests if stored.manifest.location == location}
    if not names:
        raise ConfigError(f"{run}/{location}: not found in the store", hint=_LIST)
    counting = manifest_groups.live_manifests(manifests)
    counting_here = [stored for stored in counting if stored.name in names]
    return counting_here or [
        stored for stored in counting if not names.isdisjoint(stored.manifest.supersedes)
    ]


def _list_groups(
    members: Iterable[manifest_groups.StoredManifest], records: RunRecords
) -> list[manifest_groups.Group]:
    """Return the saves that ``members``, manifests of one checkpoint, belong to; empty if none."""
    own_manifests = [stored.manifest for stored in members]
    all_manifests = (
        manifest_groups.live_manifests(records.manifests(own_manifests[0].checkpoint))
        if own_manifests
        else ()
    )
    return [
        group
        for group in manifest_groups.group_by_save(all_manifests)
        if any(group.holds(m) for m in own_manifests)
    ]


def _check_joinable(
    run: str,
    locations: Sequence[str],
    members: Sequence[manifest_groups.StoredManifest],
    records: RunRecords,
) -> None:
    """Raise ConfigError or Incomplete if the locations cannot be joined, or not now.

    ConfigError: no manifest is left, a proof shows two saves, or a location is being removed.
    Incomplete: a node is sending files of the checkpoint.
    """
    subject = " and ".join(f"{run}/{location}" for location in locations)
    if not members:
        raise ConfigError(f"{subject}: no valid manifest is left", hint=_LIST)
    checkpoint = members[0].manifest.checkpoint
    if why := manifest_groups.proofs_against(_list_groups(members, records)):
        raise ConfigError(
            f"{subject} cannot be joined: {why[0]}",
            hint="they are two saves of one name, and both are kept",
        )
    for location in locations:
        names = {stored.name for stored in members if stored.manifest.location == location}
        decision = fate(
            {n: t for n, t in records.tombstones(checkpoint).items() if t.location == location},
            names,
        )
        if reason := decision.retired or decision.shards:
            raise ConfigError(
                f"{run}/{location} is being removed: {reason}",
                hint=f"to keep it: ckptsync keep {run}/{location}",
            )
    if records.is_contended(JOIN_NODE, run, checkpoint):
        raise Incomplete(
            f"{subject}: a node is sending files of it", hint="join them when that node is done"
        )


def _write_records(
    store: Store, home: str, members: Sequence[manifest_groups.StoredManifest], records: RunRecords
) -> None:
    """Write the join, and a keep of ``home`` if a member's location was kept and ``home`` is not.

    Raises StoreError.
    """
    first = members[0].manifest
    names = tuple(sorted(stored.name for stored in members))
    append_record(store, Join(first.run, first.checkpoint, home, 0, names))
    keeps = {
        n: r
        for n, r in records.records.items()
        if isinstance(r, Keep) and r.checkpoint == first.checkpoint
    }
    reasons = {
        location: keep_reason({n: r for n, r in keeps.items() if r.location == location})
        for location in (stored.manifest.location for stored in members)
    }
    if any(reasons.values()) and not keep_reason(
        {n: r for n, r in keeps.items() if r.location == home}
    ):
        reason = next(r for r in reasons.values() if r)
        append_record(store, Keep(first.run, first.checkpoint, home, 0, keeps=True, reason=reason))


def _bring_together(
    store: Store, run: str, checkpoint: str, names: set[str], after_chunk: AfterChunk
) -> tuple[str, dict[str, str]]:
    """Move the files of each node to the save's location.

    Return that location (empty if none of ``names`` is live any more), and the former location of
    each node that was moved.  Raises Incomplete if a node is sending files of the checkpoint,
    StoreError.
    """
    context = UploadContext(StoreView(store, JOIN_NODE, run), checkpoint, after_chunk)
    moved: dict[str, str] = {}
    location = ""
    for node, source in sorted(
        {
            (stored.manifest.node, stored.manifest.location)
            for stored in manifest_groups.live_manifests(context.read().manifests)
            if stored.name in names
        }
    ):
        location = manifest_groups.better_location(node, source, context.read().manifests)
        if location == source:
            continue
        if (
            correct_location(node, source, LocalFiles(checkpoint, "trainer", {}), context)
            != location
        ):
            raise Incomplete(
                f"{run}/{location}: a node is sending files of it",
                hint="join them when that node is done",
            )
        moved[node] = source
    return location, moved
