"""Taking a checkpoint: the digest of every file, and the proof that nothing changed from the first look to the last."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptsync.digest import Digester
from ckptsync.errors import Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.layouts import rank_names, table
from ckptsync.model import Demands
from ckptsync.paths import checked_path
from ckptsync.records.manifest import FileEntry
from ckptsync.walk import Stat, look
from ckptsync.worker.hold import Held, Hold

CHUNK = 4 << 20
Passed = Callable[[int], None]


def nothing(_: int) -> None:
    """For callers who do not care how far it is."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a manifest will say: ``started`` and ``ended`` (ns) span the files' mtimes.  ``stats`` is what it holds for."""

    files: tuple[FileEntry, ...]
    stats: tuple[Stat, ...]
    ranks: tuple[int, ...]
    sources: tuple[str, ...]
    demands: Demands
    started: int
    ended: int
    notes: tuple[str, ...] = ()


def take(hold: Hold, passed: Passed = nothing) -> Taken:
    """Digest what is held.  Raises Incomplete if anything changed meanwhile, Corrupt where a file's name cannot be stored.

    ``passed`` is told the bytes of each chunk: a large checkpoint takes minutes, in which others appear.
    """
    files = tuple(_entry(hold.held[checked_path(path)], passed) for path in sorted(hold.held))
    demands, sources, notes = _asked(hold)
    taken = Taken(
        files,
        hold.stats,
        rank_names.ranks(f.path for f in files),
        sources,
        demands,
        min((f.mtime for f in files), default=0),
        max((f.mtime for f in files), default=0),
        notes,
    )
    unchanged(hold)
    return taken


def unchanged(hold: Hold) -> None:
    """Raises Incomplete unless every file is still the one that was looked at."""
    for held in hold.held.values():
        fd = held.open()
        try:
            _same(held.stat, look(fd, held.stat.path))
        finally:
            os.close(fd)


def chunks(held: Held, passed: Passed) -> Iterator[memoryview]:
    """A file's bytes, a chunk at a time in one buffer that is used again; raises Incomplete if it is not the file looked at."""
    buffer = memoryview(bytearray(min(CHUNK, max(1, held.stat.size))))
    fd = held.open()
    try:
        _same(held.stat, look(fd, held.stat.path))
        left = held.stat.size  # a file that grows is read no further than it was when it was looked at
        while left and (count := _read(fd, buffer[:left], held)):
            left -= count
            yield buffer[:count]
            passed(count)
        _same(held.stat, look(fd, held.stat.path))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # training wants the memory more than we do
    finally:
        os.close(fd)


def _read(fd: int, into: memoryview, held: Held) -> int:
    try:
        return os.readv(fd, [into])
    except OSError as e:
        if e.errno == errno.ESTALE:
            raise Incomplete(f"{held.stat.path}: deleted while it was read") from e
        raise StoreError(f"{held.root}/{held.stat.path}: {e.strerror}", hint="look at the disk that the trainer writes to") from e


def _entry(held: Held, passed: Passed) -> FileEntry:
    digester = Digester(held.stat.size)
    for chunk in chunks(held, passed):
        digester.update(chunk)
    found = digester.result()
    return FileEntry(held.stat.path, found.size, found.digest, found.block_size, found.blocks, held.stat.mtime)


def _asked(hold: Hold) -> tuple[Demands, tuple[str, ...], tuple[str, ...]]:
    """What the layouts say.  A layout that is unknown or broken is stored as it is: here it is a note, the head says it again."""
    try:
        return table.demands(hold), tuple(str(s) for s in table.sources(hold)), ()
    except (Corrupt, Unsupported) as e:
        return Demands(), (), (str(e),)


def _same(before: Stat, after: Stat) -> None:
    if before != after:
        raise Incomplete(f"{before.path}: changed while it was read", hint="it is taken again when it is quiet")
