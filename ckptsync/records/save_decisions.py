"""Records that decide about a save: tombstones of heads, keeps and joins of people.

Heads delete and people protect without locks. So each writes a record, and what the records decide
is a function of their set: all who have read the same agree. No worker sends a save again that a
tombstone names. A location is marked first, and deleted a grace period later; until deletion begins
a later tombstone can withdraw the mark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.records.manifest import Manifest
from ckptsync.records.store_paths import FORMAT, parse_record_name
from ckptsync.typed_json import Count, FormatNumber, Nanoseconds

Scope = Literal["location", "shards"]
Stage = Literal["marked", "begun", "done", "withdrawn"]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A stage in the deletion of a save.

    ``manifests``: the records of the save that is given up; ``reason`` is for people. ``scope``:
    the whole location, or the trainer's own files (``shards``) while the consolidated model stays.
    ``stage``: ``begun`` before the first file is deleted, ``done`` when no shard is left;
    ``withdrawn`` withdraws what lower numbers say of these manifests. ``ended``: node → mtime of
    its last file, ns on its own clock, by which it recognises its save when its manifest is
    deleted. ``metrics``: of shards, what `trainer_state.json` said, so that the best checkpoints
    are still known. ``by``: of ``begun``, random, so that two heads that begin at once write two
    records and each sees the other's.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    reason: str
    scope: Scope = "location"
    stage: Stage = "marked"
    ended: dict[str, Nanoseconds] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    by: str = ""
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class Fate:
    """What tombstones decide about a save.

    ``retired``: why all of it is given up; ``shards``: why its trainer's own files are; each is
    empty if they are not. ``stones``: names of the tombstones in force. ``is_begun``: files may be
    deleted already, so nothing can be withdrawn; ``is_done``: no shard is left.
    """

    retired: str = ""
    shards: str = ""
    stones: tuple[str, ...] = ()
    is_begun: bool = False
    is_done: bool = False


def tombstones_in_force(stones: Mapping[str, Tombstone]) -> dict[str, Tombstone]:
    """Return the tombstones of a location that no later withdrawal withdraws, by name.

    Withdrawals are left out. One counts if it has a higher number, the same scope, and one of the
    tombstone's manifests; with the same number it came too late.
    """

    def is_withdrawn(stone: Tombstone) -> bool:
        """Return whether a withdrawal with a higher number names one of its manifests."""
        later = (w for w in withdrawals if w.n > stone.n and w.scope == stone.scope)
        return any(not set(stone.manifests).isdisjoint(w.manifests) for w in later)

    withdrawals = [t for t in stones.values() if t.stage == "withdrawn"]
    return {
        name: t
        for name, t in sorted(stones.items())
        if t.stage != "withdrawn" and not is_withdrawn(t)
    }


def fate(stones: Mapping[str, Tombstone], manifests: Collection[str]) -> Fate:
    """Return what the tombstones in force decide about the save of these manifests.

    ``manifests``: the names of those that count. A tombstone that names none of them is ignored. If
    one is of the whole location, the result's ``stones`` are those of the whole location alone. A
    tombstone without a reason gives its name as the reason.
    """
    names = set(manifests)
    in_force = {
        name: tombstone
        for name, tombstone in tombstones_in_force(stones).items()
        if not names.isdisjoint(tombstone.manifests)
    }
    whole = {
        name: tombstone for name, tombstone in in_force.items() if tombstone.scope == "location"
    }
    counting = whole or in_force
    return Fate(
        retired=next((tombstone.reason or name for name, tombstone in whole.items()), ""),
        shards=next(
            (
                tombstone.reason or name
                for name, tombstone in in_force.items()
                if tombstone.scope == "shards"
            ),
            "",
        ),
        stones=tuple(counting),
        is_begun=any(tombstone.stage != "marked" for tombstone in counting.values()),
        is_done=not whole and any(tombstone.stage == "done" for tombstone in in_force.values()),
    )


@dataclass(frozen=True, slots=True)
class Keep:
    """A person keeps a location, or releases it if ``keeps`` is false; ``reason`` is for people."""

    run: str
    checkpoint: str
    location: str
    n: Count
    keeps: bool
    reason: str = ""
    format: FormatNumber = FORMAT


def keep_reason(keeps: Mapping[str, Keep]) -> str:
    """Return why a location is kept (`kept by hand` if nobody said why); empty if it is not.

    The highest number counts; on a tie, keep wins over release.
    """
    newest = max(((k.n, k.keeps, name) for name, k in keeps.items()), default=(0, False, ""))
    return (keeps[newest[2]].reason or "kept by hand") if newest[1] else ""


@dataclass(frozen=True, slots=True)
class Join:
    """A person's declaration that these manifests are one save, though nothing proves it.

    ``manifests``: their names, in whatever locations of the checkpoint's name.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    format: FormatNumber = FORMAT


def joins_by_manifest(
    manifests: Mapping[str, Manifest], joins: Mapping[str, Join]
) -> dict[str, frozenset[str]]:
    """Return, for each manifest's name, the names of the joins that hold for it.

    A join holds for the manifests that it names, and for those by which their own nodes have
    superseded them. ``manifests``: all of a checkpoint's name, also superseded ones.
    """
    joins_of_name: dict[str, set[str]] = {name: set() for name in manifests}
    for join_name, join in joins.items():
        members = {
            name: parsed.node for name in join.manifests if (parsed := parse_record_name(name))
        }
        successors = members
        while successors:  # manifests by which their own nodes have replaced them
            successors = {
                name: m.node
                for name, m in manifests.items()
                if name not in members and any(members.get(old) == m.node for old in m.supersedes)
            }
            members |= successors
        for name in members.keys() & joins_of_name.keys():
            joins_of_name[name].add(join_name)
    return {name: frozenset(join_names) for name, join_names in joins_of_name.items()}
