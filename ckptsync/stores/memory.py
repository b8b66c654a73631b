"""A store in memory: what the contract means, without a disk."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptsync.errors import Corrupt, Exists, NotFound
from ckptsync.paths import checked_path
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, announced, checked_prefix


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    mtime: float


class MemoryStore:
    """Lives as long as the object.  Its clock counts writes, one second each, so that tests can say what comes first."""

    late = 0.0
    is_exclusive = True

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._files: dict[str, _File] = {}
        self._clock = itertools.count(1)
        self._lock = threading.Lock()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        checked_prefix(prefix)
        with self._lock:
            files = sorted((n, f) for n, f in self._files.items() if n.startswith(prefix))
        for name, file in files:
            yield Entry(name, len(file.content), file.mtime)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        checked_prefix(prefix)
        with self._lock:
            below = [name.removeprefix(prefix) for name in self._files if name.startswith(prefix + start)]
        return sorted({found for found, slash, _ in (name.partition("/") for name in below) if slash})

    def size(self, name: str) -> int:
        """As the contract says."""
        return len(self._content(name))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        piece = memoryview(self._content(name))[start : start + out.nbytes]
        if len(piece) < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + len(piece)}, {out.nbytes} bytes from {start} wanted")
        if piece:
            out.cast("B")[:] = piece

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        content = _joined(name, announced(chunks, about))
        with self._lock:
            self._files[name] = _File(content, next(self._clock))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        content = _joined(name, announced(chunks, about))
        with self._lock:
            if name in self._files:
                raise Exists(f"{name}: already there")
            self._files[name] = _File(content, next(self._clock))

    def delete(self, name: str) -> None:
        """As the contract says."""
        with self._lock:
            self._files.pop(checked_path(name), None)

    def _content(self, name: str) -> bytes:
        try:
            return self._files[checked_path(name)].content
        except KeyError:
            raise NotFound(f"{name}: not in {self.url}") from None


def _joined(name: str, chunks: Iterable[Chunk]) -> bytes:
    checked_path(name)
    out = bytearray()
    for chunk in chunks:
        out += memoryview(chunk)
    return bytes(out)
