"""A checkpoint as this node can read it: in its pin where it is pinned, else where the trainer left it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ckptsync.errors import Corrupt, Incomplete, StoreError
from ckptsync.scan import Family, Found
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat, open_file, open_in, opened_parent

AGAIN = "push it again when the trainer has finished; a daemon does so by itself"
LATER = "has the trainer removed it?  Push a later checkpoint; a daemon pins what it takes before it goes"


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
