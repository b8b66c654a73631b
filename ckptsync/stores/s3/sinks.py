"""Where the bytes of a ranged read go: into the caller's memory, or through it.

They stay what they are when a connection breaks: the next answer goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Sink(Protocol):
    """``done`` of ``size`` bytes have come."""

    size: int
    done: int

    def room(self) -> memoryview:
        """Where the next bytes go; never empty before all have come."""
        ...

    def took(self, count: int) -> None:
        """So many bytes have been put there."""
        ...

    def restart(self) -> bool:
        """From the first byte, as the file was replaced; whether that is still possible."""
        ...


class Into:
    """Memory for all of it."""

    def __init__(self, out: memoryview) -> None:
        self._out, self.size, self.done = out, len(out), 0

    def room(self) -> memoryview:
        """As `Sink` says."""
        return self._out[self.done :]

    def took(self, count: int) -> None:
        """As `Sink` says."""
        self.done += count

    def restart(self) -> bool:
        """As `Sink` says."""
        self.done = 0
        return True


class Refused(Exception):
    """``take`` raised ``error``, which is nobody else's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Through:
    """``take`` gets one buffer of bytes after the other: all full but the last.  What it raises is raised as `Refused`."""

    def __init__(self, size: int, buffer: memoryview, take: Callable[[memoryview], None]) -> None:
        self.size, self.done = size, 0
        self._buffer, self._take, self._filled = buffer, take, 0

    def room(self) -> memoryview:
        """As `Sink` says."""
        return self._buffer[self._filled : self._filled + self.size - self.done]

    def took(self, count: int) -> None:
        """As `Sink` says."""
        self.done, self._filled = self.done + count, self._filled + count
        if self._filled == len(self._buffer) or self.done == self.size:
            full, self._filled = self._buffer[: self._filled], 0
            try:
                self._take(full)
            except BaseException as e:
                raise Refused(e) from e

    def restart(self) -> bool:
        """As `Sink` says: not once bytes have gone on."""
        if self.done > self._filled:
            return False
        self.done = self._filled = 0
        return True
