"""Taking a checkpoint: what each file is, and the proof that nothing changed from the first look to the last.

Bytes are read once where that is enough: a file is digested on its way to the store (`worker.content`), and read before only where its digest
decides where it belongs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptsync.errors import Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.layouts import rank_names, table
from ckptsync.model import Demands
from ckptsync.paths import checked_path
from ckptsync.records.manifest import FileEntry
from ckptsync.stores import ending
from ckptsync.stores.writing import chunk_room
from ckptsync.walk import Stat, look
from ckptsync.worker.hold import AGAIN, LATER, Held, Hold, each_open

CHUNK = 4 << 20
Passed = Callable[[int], None]
"""Told the bytes of each chunk; fewer than none where bytes that were told of have to be read again."""


class Changed(Incomplete):
    """A file is not the one that was looked at: whatever was read of it is worth nothing."""


def nothing(_: int) -> None:
    """For callers who do not care how far it is."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a manifest will say: ``started`` and ``ended`` (ns) span the files' mtimes.  ``stats`` is what it holds for.

    ``read``: by path, the entries of files that have been read by now.  It grows.
    """

    stats: tuple[Stat, ...]
    ranks: tuple[int, ...]
    sources: tuple[str, ...]
    demands: Demands
    started: int
    ended: int
    notes: tuple[str, ...] = ()
    read: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All of them; without a digest those that nobody has read yet."""
        return tuple(self.read.get(s.path) or unread(s) for s in self.stats)


def take(hold: Hold) -> Taken:
    """What is held, unread but for metadata.  Raises Incomplete if anything changed meanwhile, Corrupt where a file's name cannot be stored."""
    for path in hold.held:
        checked_path(path)
    demands, sources, notes = _asked(hold)
    times = [h.stat.mtime for h in hold.held.values() if not h.is_added]  # what the hook adds is as old as the training
    taken = Taken(
        hold.stats, rank_names.ranks(sorted(hold.held)), sources, demands, min(times, default=0), max(times, default=0), notes
    )
    unchanged(hold)
    return taken


def unread(stat: Stat) -> FileEntry:
    """A file whose digest is still open."""
    return FileEntry(stat.path, stat.size, "", 0, (), stat.mtime)


def unchanged(hold: Hold) -> None:
    """Raises Changed, or Incomplete, unless every file is still the one that was looked at."""
    for held, fd in each_open(hold.held.values()):
        _same(held.stat, look(fd, held.stat.path))


def chunks(held: Held, passed: Passed, clone: int | None = None) -> Iterator[memoryview]:
    """A file's bytes, a chunk at a time in one buffer that is used again.

    Raises Changed if it is not the file looked at, Transient once the process is about to end.

    They are read out of the descriptor ``clone``, if there is one: a copy that was made of the file before.
    """
    buffer = chunk_room(min(CHUNK, held.stat.size))
    fd = held.open()
    try:
        _same(held.stat, look(fd, held.stat.path))
        left = held.stat.size  # a file that grows is read no further than it was when it was looked at
        while left and (count := _read(fd if clone is None else clone, buffer[:left], held.stat.size - left, held)):
            ending.go_on(held.stat.path)
            left -= count
            yield buffer[:count]
            passed(count)
        _same(held.stat, look(fd, held.stat.path))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # training wants the memory more than we do
    finally:
        os.close(fd)


def _read(fd: int, into: memoryview, start: int, held: Held) -> int:
    try:
        return os.preadv(fd, [into], start)
    except OSError as e:
        if e.errno == errno.ESTALE:
            raise Changed(f"{held.stat.path}: deleted while it was read", hint=LATER) from e
        raise StoreError(f"{held.root}/{held.stat.path}: {e.strerror}", hint="look at the disk that the trainer writes to") from e


def _asked(hold: Hold) -> tuple[Demands, tuple[str, ...], tuple[str, ...]]:
    """What the layouts say.  A layout that is unknown or broken is stored as it is: here it is a note, the head says it again."""
    try:
        return table.demands(hold), tuple(str(s) for s in table.sources(hold)), ()
    except (Corrupt, Unsupported) as e:
        return Demands(), (), (str(e),)


def _same(before: Stat, after: Stat) -> None:
    if before.was_touched(after):
        raise Changed(f"{before.path}: changed while it was read", hint=AGAIN)
