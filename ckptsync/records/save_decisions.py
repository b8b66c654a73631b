"""Decisions about saves: tombstones of heads, and keeps and joins of people.

No worker sends a save again that a tombstone names.  A location is marked first, and deleted a
grace period later; until that has begun the mark can be withdrawn.  What tombstones say is a
function of their set, so that all who have read the same agree; so is what keeps and joins say.
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
    """``manifests``: the records of the save that is given up; ``reason`` is for people.

    ``scope``: all of it, or the trainer's own files (``shards``) while the consolidated model
    stays.  ``stage``: ``begun`` before the first file is deleted, ``done`` when no shard is left;
    ``withdrawn`` withdraws what lower numbers say of these manifests.  ``ended``: node → mtime of
    its last file, ns on its own clock, by which it knows its save again when its manifest is gone.
    ``metrics``: of shards, what `trainer_state.json` said, so that the best are still known.
    ``by``: of ``begun``, random: so two heads that begin at once write two records, and each sees
    the other's.
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
    """Reasons why a location, or its trainer's own files, were given up.

    ``retired`` is of the location, ``shards`` of the files; each is empty where it was not given
    up.

    ``stones``: names of the tombstones in force.  ``is_begun``: files may be deleted already, so
    that nothing can be withdrawn; ``is_done``: no shard is left.
    """

    retired: str = ""
    shards: str = ""
    stones: tuple[str, ...] = ()
    is_begun: bool = False
    is_done: bool = False


def tombstones_in_force(stones: Mapping[str, Tombstone]) -> dict[str, Tombstone]:
    """Return the tombstones of a location that were not withdrawn.

    Under the same number a withdrawal came too late.
    """

    def is_withdrawn(stone: Tombstone) -> bool:
        later = (w for w in withdrawals if w.n > stone.n and w.scope == stone.scope)
        return any(not set(stone.manifests).isdisjoint(w.manifests) for w in later)

    withdrawals = [t for t in stones.values() if t.stage == "withdrawn"]
    return {
        name: t
        for name, t in sorted(stones.items())
        if t.stage != "withdrawn" and not is_withdrawn(t)
    }


def fate(stones: Mapping[str, Tombstone], manifests: Collection[str]) -> Fate:
    """Return what tombstones say of a save.  ``manifests``: the names of those that count."""
    names = set(manifests)
    force = {
        name: t
        for name, t in tombstones_in_force(stones).items()
        if not names.isdisjoint(t.manifests)
    }
    whole = {name: t for name, t in force.items() if t.scope == "location"}
    counting = whole or force
    return Fate(
        retired=next((t.reason or name for name, t in whole.items()), ""),
        shards=next((t.reason or name for name, t in force.items() if t.scope == "shards"), ""),
        stones=tuple(counting),
        is_begun=any(t.stage != "marked" for t in counting.values()),
        is_done=not whole and any(t.stage == "done" for t in force.values()),
    )


@dataclass(frozen=True, slots=True)
class Keep:
    """A person keeps a location, or releases it where ``keeps`` is false.

    ``reason`` is for people.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    keeps: bool
    reason: str = ""
    format: FormatNumber = FORMAT


def keep_reason(keeps: Mapping[str, Keep]) -> str:
    """Return why a location is kept, or "".

    The highest number counts; on a tie, keep wins over release.
    """
    last = max(((k.n, k.keeps, name) for name, k in keeps.items()), default=(0, False, ""))
    return (keeps[last[2]].reason or "kept by hand") if last[1] else ""


@dataclass(frozen=True, slots=True)
class Join:
    """A user's declaration that these manifests belong to one save, though nothing proves it.

    ``manifests``: names of those that are parts of one save, in whatever locations of the
    checkpoint's name.
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
    """Return the names of the joins that hold for each manifest.

    They name the manifest, or one that its node has moved from.

    ``manifests``: all of a checkpoint's name, also those superseded.
    """
    found: dict[str, set[str]] = {name: set() for name in manifests}
    for join_name, join in joins.items():
        members = {
            name: parsed.node for name in join.manifests if (parsed := parse_record_name(name))
        }
        new = members
        while new:  # manifests by which their own nodes have replaced them
            new = {
                name: m.node
                for name, m in manifests.items()
                if name not in members and any(members.get(old) == m.node for old in m.supersedes)
            }
            members |= new
        for name in members.keys() & found.keys():
            found[name].add(join_name)
    return {name: frozenset(its) for name, its in found.items()}
