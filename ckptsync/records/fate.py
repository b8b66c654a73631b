"""What tombstones say of a location, all of them together: a function of the set, so that all who have read the same agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptsync.records.tombstone import Tombstone


@dataclass(frozen=True, slots=True)
class Fate:
    """Reasons why a location (``retired``), or its trainer's own files (``shards``), were given up; empty where they were not.

    ``said``: names of the tombstones in force.  ``is_begun``: files may be gone already, so that nothing can be taken back; ``is_done``: no shard is left.
    """

    retired: str = ""
    shards: str = ""
    said: tuple[str, ...] = ()
    is_begun: bool = False
    is_done: bool = False


def in_force(stones: Mapping[str, Tombstone]) -> dict[str, Tombstone]:
    """Those that were not taken back.  ``stones``: of one location.  Where one says so under the same number, it was too late."""
    backs = [t for t in stones.values() if t.stage == "back"]
    return {name: t for name, t in sorted(stones.items()) if t.stage != "back" and not any(_takes_back(b, t) for b in backs)}


def fate(stones: Mapping[str, Tombstone], manifests: Collection[str]) -> Fate:
    """What they say of a save.  ``manifests``: the names of those that count."""
    names = set(manifests)
    force = {name: t for name, t in in_force(stones).items() if not names.isdisjoint(t.manifests)}
    whole = {name: t for name, t in force.items() if t.scope == "location"}
    counting = whole or force
    return Fate(
        retired=_reason(whole),
        shards=_reason({name: t for name, t in force.items() if t.scope == "shards"}),
        said=tuple(counting),
        is_begun=any(t.stage != "said" for t in counting.values()),
        is_done=not whole and any(t.stage == "done" for t in force.values()),
    )


def _takes_back(back: Tombstone, stone: Tombstone) -> bool:
    return stone.n < back.n and stone.scope == back.scope and not set(stone.manifests).isdisjoint(back.manifests)


def _reason(stones: Mapping[str, Tombstone]) -> str:
    return next((t.reason or name for name, t in stones.items()), "")
