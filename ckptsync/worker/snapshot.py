"""A checkpoint as this node can read it, and its snapshot: what each file is, and the proof that nothing changed while it was read.

Files are read from the pin where they are pinned, else where the trainer left them.  A file is read once where that is enough: it is digested on its
way to the store (`worker.content`), and read before only where its digest decides where it belongs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ckptsync.errors import Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.layouts import rank_names, table
from ckptsync.model import Demands
from ckptsync.paths import checked_path
from ckptsync.records.manifest import FileEntry
from ckptsync.scan import Family, Found, Spot
from ckptsync.spool.pins import Pin
from ckptsync.stores import ending
from ckptsync.stores.writing import chunk_room
from ckptsync.walk import Stat, look, open_file, open_in, opened_parent

AGAIN = "push it again when the trainer has finished; a daemon does so by itself"
LATER = "has the trainer removed it?  Push a later checkpoint; a daemon pins what it takes before it goes"
CHUNK = 4 << 20
Passed = Callable[[int], None]
"""Told the bytes of each chunk; fewer than none where bytes that were told of have to be read again."""


@dataclass(frozen=True, slots=True)
class Held:
    """One file and the directory it is read from.  ``is_added``: the hook put it there, before the trainer wrote the checkpoint."""

    stat: Stat
    root: Path
    is_pinned: bool
    is_added: bool = False

    def open(self) -> int:
        """A descriptor; raises Incomplete if it is gone."""
        with _told_when_gone():
            return open_file(self.root, self.stat.path)


@dataclass(frozen=True, slots=True)
class Hold:
    """``held`` by path: what is sent.  ``unsent`` is not, by choice, but tells as well as the rest what the checkpoint is.

    ``partial`` and ``others`` are the source's; ``gone`` if there is no source any more.
    """

    name: str
    family: Family
    held: Mapping[str, Held]
    partial: tuple[Stat, ...] = ()
    others: tuple[str, ...] = ()
    gone: bool = False
    unsent: Mapping[str, Held] = field(default_factory=dict)
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _stats: tuple[Stat, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # both are asked for once a file
        object.__setattr__(self, "_sizes", {path: h.stat.size for path, h in {**self.unsent, **self.held}.items()})
        object.__setattr__(self, "_stats", tuple(self.held[path].stat for path in sorted(self.held)))

    @property
    def stats(self) -> tuple[Stat, ...]:
        """Of the files, by path."""
        return self._stats

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is not sent: by choice, since a writer has not finished it, or since it is a link or a special file."""
        return tuple(sorted({*self.unsent, *self.others, *(s.path for s in self.partial)}))

    @property
    def unpinned(self) -> tuple[str, ...]:
        """Files that only the trainer's own directory holds: rotation may take them at any moment."""
        return tuple(sorted(p for p, h in self.held.items() if not h.is_pinned))

    def with_added(self, root: Path, files: Iterable[Stat]) -> Hold:
        """Also with files in ``root``, but for names that the checkpoint has of its own."""
        added = {f.path: Held(f, root, is_pinned=True, is_added=True) for f in files if f.path not in self.held}
        return replace(self, held=added | dict(self.held))

    def only(self, paths: Collection[str]) -> Hold:
        """Of this only some files to send."""
        kept = {path: h for path, h in self.held.items() if path in paths}
        return replace(self, held=kept, unsent={path: h for path, h in self.held.items() if path not in paths})

    def sizes(self) -> Mapping[str, int]:
        """As `ckptsync.model.Files` says: at the time of the look."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `ckptsync.model.Files` says; StoreError where the disk refuses."""
        held = self.held.get(name) or self.unsent.get(name)
        if held is None:
            raise Incomplete(f"{name}: not in {self.name}")
        fd = held.open()
        try:
            fill(fd, start, out, f"{self.name}/{name}")
        finally:
            os.close(fd)


def hold(found: Found | None, pin: Pin | None, family: Family, name: str) -> Hold:
    """What there is to read.  A pin's names stay when the source loses them: rotation takes files one by one."""
    held = {f.path: Held(f, found.path, is_pinned=False) for f in found.files} if found else {}
    if pin is not None:
        root = pin.root  # a Path costs more than a Held
        held |= {f.path: Held(f, root, is_pinned=True) for f in pin.files}
    is_gone = found is None or not (found.files or found.partial)
    return Hold(name, family, held, found.partial if found else (), found.others if found else (), is_gone)


def each_open(files: Iterable[Held]) -> Iterator[tuple[Held, int]]:
    """Each with a descriptor until the next is asked for; raises Incomplete if one is gone.  A directory is opened once for its files in a row."""
    for (root, _), several in groupby(files, lambda held: (held.root, held.stat.path.rpartition("/")[0])):
        row = list(several)
        with _told_when_gone(), opened_parent(root, row[0].stat.path) as (parent, _):
            for held in row:
                fd = open_in(parent, held.stat.path.rpartition("/")[2], root, held.stat.path)
                try:
                    yield held, fd
                finally:
                    os.close(fd)


@contextlib.contextmanager
def _told_when_gone() -> Iterator[None]:
    try:
        yield
    except Incomplete as e:
        raise Incomplete(str(e), hint=LATER) from e


def fill(fd: int, start: int, out: memoryview, name: str) -> None:
    """Fill ``out`` from byte ``start`` of an open file; raises Corrupt if it ends before."""
    got = 0
    while got < len(out):
        try:
            count = os.preadv(fd, [out[got:]], start + got)
        except OSError as e:
            raise StoreError(f"{name}: {e.strerror}", hint="look at the disk that the trainer writes to") from e
        if count == 0:
            raise Corrupt(f"{name}: ends at byte {start + got}, {start + len(out)} expected")
        got += count


@dataclass(frozen=True, slots=True)
class Seen:
    """One save of a checkpoint: what can be read of it, and whose pin holds it (``None``: it is not pinned)."""

    run: str
    spot: Spot
    hold: Hold
    pin: Pin | None

    @property
    def k(self) -> int:
        """The pin's number; 0 without one."""
        return self.pin.k if self.pin else 0


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
