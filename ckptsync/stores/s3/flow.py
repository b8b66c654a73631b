"""Bytes through one connection: no more of them than may, and never so few that it hangs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ckptsync.stores.limits import Limits

TRICKLE = 64 << 10
"""Fewer bytes than this in `Limits.stall` seconds are no transfer."""


class Flow:
    """Sees that bytes move, and that no more of them do than may: the time spent waiting for the pace is nobody's stall.  Raises OSError."""

    def __init__(self, sock: socket.socket, limits: Limits, patience: float = 1.0) -> None:
        self._sock, self._pace, self._stall = sock, limits.pace, limits.stall * patience
        self._spent, self._moved = 0.0, 0

    def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        view = memoryview(data)
        piece = self._pace.piece
        for start in range(0, len(view), piece):
            self._pace.take(min(piece, len(view) - start))
            self._send(view[start : start + piece])

    def send_together(self, head: bytes, body: bytes | memoryview) -> None:
        """A head and a small body in one packet, if it takes them; only the body is paced."""
        self._pace.take(len(body))
        self._send(memoryview(head + body))

    def receive(self, step: Callable[[memoryview], int], room: memoryview) -> int:
        """What one step brings of a body."""
        count = self._moving(step, room[: self._pace.piece])
        self._pace.take(count)  # what is not taken from the socket is not sent to it: the window closes
        return count

    def _send(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._moving(self._sock.send, view[done:])

    def _moving(self, step: Callable[[memoryview], int], view: memoryview) -> int:
        left = self._stall - self._spent
        if left <= 0:
            raise TimeoutError
        wait_at_most(self._sock, left)
        start = time.monotonic()
        count = step(view)
        self._spent += time.monotonic() - start
        self._moved += count
        if self._moved >= TRICKLE:
            self._spent, self._moved = 0.0, 0
        return count


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """For the next bytes, give or take a tenth: setting it anew is a system call."""
    have = sock.gettimeout()
    if have is None or not 0.9 * seconds <= have <= 1.1 * seconds:
        sock.settimeout(seconds)
