"""A pace for tests."""

from __future__ import annotations

from ckptsync.stores.limits import LEAST_PIECE


class Counted:
    """Bytes go at once; ``taken`` is how many were asked for, each time."""

    piece = LEAST_PIECE

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, count: int) -> None:
        self.taken.append(count)
