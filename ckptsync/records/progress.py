"""What a node does with a checkpoint, or waits to do: an entry of its heartbeat.

Workers and heads do not talk to each other, and a save that is on its way has no record yet. So
each node lists its work in its heartbeat, for people and for `status`; nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptsync.typed_json import Amount, Count, Seconds

Kind = Literal["upload", "repair", "consolidate", "verify", "retain", "event"]
State = Literal["waiting", "queued", "uploading", "repairing", "refused", "failed", "running"]
MOVING: tuple[str, ...] = ("uploading", "repairing", "running")
"""States in which bytes move."""
OF_SAVES: tuple[str, ...] = ("upload", "repair")
"""Kinds of work on files that this node has; the others are a head's jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One save that is not wholly stored yet, or one job of a head.

    ``kind`` and ``state`` are a `Kind` and a `State`, or what a later version writes. ``location``
    is empty if it is not decided yet; ``run`` and ``checkpoint`` are empty for a job on a whole run
    or store. ``reason`` and ``hint``: why it waits or failed, and what to do. ``since``: when the
    work began, ``until``: when it continues by itself, both in seconds on the node's clock.
    ``done`` of ``total`` bytes (0: not known); ``rate``: bytes a second over the last minute.
    ``name``: which event of a configuration.
    """

    kind: str
    state: str
    run: str = ""
    checkpoint: str = ""
    location: str = ""
    reason: str = ""
    hint: str = ""
    since: Seconds = 0.0
    until: Seconds | None = None
    done: Count = 0
    total: Count = 0
    rate: Amount = 0.0
    name: str = ""

    @property
    def subject(self) -> str:
        """Return what messages call its object: `RUN/LOCATION`, the run, or `every run`."""
        name = self.location or self.checkpoint
        return f"{self.run}/{name}" if name else self.run or "every run"

    @property
    def is_moving(self) -> bool:
        """Return whether bytes move now, by the state of the work."""
        return self.state in MOVING
