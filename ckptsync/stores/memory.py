"""A store in memory: the contract in its simplest form, for tests and for trying things out.

A dictionary under a lock has every property that the contract demands, so tests compare other
stores with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator

from ckptsync.errors import Exists, NotFound
from ckptsync.safe_names import checked_path
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import (
    UNKNOWN,
    About,
    Chunk,
    Entry,
    check_size,
    checked_prefix,
    too_short,
)


class MemoryStore:
    """A store that lives as long as the object.

    Its clock counts writes, one second each, so that tests can say which file is older.
    """

    late = 0.0
    is_exclusive = True

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._files: dict[str, tuple[bytes, float]] = {}  # content and time
        self._clock = itertools.count(1)
        self._lock = threading.Lock()

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the stored files below ``prefix``, sorted by name."""
        checked_prefix(prefix)
        with self._lock:
            files = sorted((n, f) for n, f in self._files.items() if n.startswith(prefix))
        for name, (content, mtime) in files:
            yield Entry(name, len(content), mtime)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the directories directly below ``prefix`` (see `Store.dirs`)."""
        checked_prefix(prefix)
        with self._lock:
            below = [
                name.removeprefix(prefix) for name in self._files if name.startswith(prefix + start)
            ]
        return sorted(
            {directory for directory, slash, _ in (name.partition("/") for name in below) if slash}
        )

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound."""
        return len(self._content(name))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        piece = memoryview(self._content(name))[start : start + out.nbytes]
        if len(piece) < out.nbytes:
            raise too_short(name, start + len(piece), start, out.nbytes)
        if piece:
            out.cast("B")[:] = piece

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store the content; replace what has the name."""
        content = _join(name, check_size(chunks, about))
        with self._lock:
            self._files[name] = (content, next(self._clock))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists, after all chunks were read, if the name is taken."""
        content = _join(name, check_size(chunks, about))
        with self._lock:
            if name in self._files:
                raise Exists(f"{name}: already there")
            self._files[name] = (content, next(self._clock))

    def delete(self, name: str) -> None:
        """Delete a file; do nothing if it is not there."""
        with self._lock:
            self._files.pop(checked_path(name), None)

    def _content(self, name: str) -> bytes:
        """Return the bytes of a file; raise NotFound."""
        try:
            return self._files[checked_path(name)][0]
        except KeyError:
            raise NotFound(f"{name}: not in {self.url}") from None


def _join(name: str, chunks: Iterable[Chunk]) -> bytes:
    """Return all chunks as one, counted as sent; raise Corrupt if ``name`` is not plain."""
    checked_path(name)
    content = b"".join(map(bytes, chunks))
    progress_signs.count_sent(len(content))
    return content
