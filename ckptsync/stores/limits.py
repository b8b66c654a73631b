"""What transfers may take of this machine and its network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ckptsync.stores import signs

LEAST_PIECE = 256 << 10
MOST_PIECE = 1 << 20


class Pace(Protocol):
    """Who moves bytes over a network asks first, so that all transfers of a process share one bandwidth."""

    @property
    def piece(self) -> int:
        """Bytes to ask for at a time, at most: few, so that a change of the rate is felt soon, and what is little has not to wait for long."""
        ...

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may go."""
        ...


class Unlimited:
    """No bandwidth is set."""

    piece = MOST_PIECE

    def take(self, count: int) -> None:
        """Return at once."""
        if count >= signs.LEAST:
            signs.give()


@dataclass(frozen=True, slots=True)
class Limits:
    """``threads``: parts sent, or ranges read ahead, at once.  ``memory``: bytes of parts in flight.

    ``patience``: seconds for which what fails transiently is tried again.  ``stall``: seconds without a byte after which a transfer is broken off,
    and tried again.
    """

    pace: Pace = field(default_factory=Unlimited)
    threads: int = 4
    memory: int = 96 << 20
    patience: float = 120.0
    stall: float = 60.0
