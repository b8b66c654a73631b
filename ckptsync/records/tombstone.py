"""Letting go: no worker sends a tombstoned save again."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Tombstone:
    """``manifests``: the records of the save that is given up; ``reason`` is for people."""

    run: str
    checkpoint: str
    place: str
    n: int
    manifests: tuple[str, ...]
    reason: str
    format: int = FORMAT
