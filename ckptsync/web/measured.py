"""What a process knows of itself, as its pages tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptsync.fleet.heartbeat import Disk, Job


@dataclass(frozen=True, slots=True)
class Loop:
    """One of the process's ticks: ``runs`` that ended, those that ``failed``, and for how many seconds it has been at work, 0 if it rests."""

    name: str
    runs: int
    failed: int
    busy: float


@dataclass(frozen=True, slots=True)
class Told:
    """One channel of alerts: messages that were ``delivered``, tries that ``failed``."""

    channel: str
    delivered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Process:
    """What this process knows of itself.  ``oldest``: seconds for which the first of the queue has waited; ``errors``: how many its last ticks had."""

    node: str
    version: str
    roles: tuple[str, ...]
    is_healthy: bool
    loops: Sequence[Loop] = ()
    queue: int = 0
    oldest: float = 0.0
    sent_bytes: int = 0
    errors: int = 0
    disks: Sequence[Disk] = ()
    jobs: Sequence[Job] = ()
    told: Sequence[Told] = ()
