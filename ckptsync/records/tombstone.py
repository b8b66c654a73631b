"""Tombstones: what is given up, and what all tombstones of a location say together.

No worker sends a tombstoned save again.  A tombstone is said first, and carried out when it has stood for a while; until that has begun it can be
taken back.  What tombstones say is a function of their set, so that all who have read the same agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.decoding import Count, FormatNumber, Nanoseconds

FORMAT = 1
Scope = Literal["location", "shards"]
Stage = Literal["said", "begun", "done", "back"]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """``manifests``: the records of the save that is given up; ``reason`` is for people.

    ``scope``: all of it, or the trainer's own files (``shards``) while the consolidated model stays.  ``stage``: ``begun`` before the first file
    goes, ``done`` when no shard is left; ``back`` takes back what was said of these manifests under lower numbers.  ``ended``: node → mtime of
    its last file, ns on its own clock, by which it knows its save again when its manifest is gone.  ``metrics``: of shards that go, what
    `trainer_state.json` said, so that the best are still known.  ``by``: of `begun`, a word of the head's own that no other writes: so two that begin at
    once write two records, and each sees the other's.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    reason: str
    scope: Scope = "location"
    stage: Stage = "said"
    ended: dict[str, Nanoseconds] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    by: str = ""
    format: FormatNumber = FORMAT


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
