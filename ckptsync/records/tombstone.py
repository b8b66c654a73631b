"""Letting go: no worker sends a tombstoned save again.

A tombstone is said first, and carried out when it has stood for a while; until that has begun it can be taken back.
"""

from __future__ import annotations

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
