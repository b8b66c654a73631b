"""What simulated power cuts interrupt: a store at work, whose every change of a file is recorded.

A `Recorder` replaces the functions of ``os`` that change files while it is open.  Inodes are
numbers, 0 is the store's root, whose own name is durable.  A work is a row of operations.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ckptsync.errors import Exists
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.posix import publish
from ckptsync.stores.posix.store import PosixStore

LARGE = (300 << 10) + 5  # written past the cache, where there is a disk; its last bytes through it
_CHANGES = ("open", "mkdir", "unlink", "rmdir", "rename", "link", "pwrite", "ftruncate", "fsync")


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes at a place of a file; ``data`` ends the file there if it is ``None``."""

    inode: int
    start: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Names:
    """One change of a directory, which is seen whole or not at all: a rename takes one name away
    and gives another.
    """

    directory: int
    gone: str = ""
    name: str = ""
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """All earlier steps of this file, or of this directory's own names, are durable."""

    inode: int
    where: str


Step = Data | Names | Sync


@dataclass(slots=True)
class Call:
    """One call of a store: the numbers of steps before it, and before its end, if that came.

    ``content``: of a file, ``None`` of a delete.  ``is_told``: it ended with Exists.
    """

    name: str
    content: bytes | None
    begun: int
    ended: int | None = None
    is_told: bool = False

    def is_over(self, moment: int) -> bool:
        """Return whether it has ended before a step."""
        return self.ended is not None and self.ended <= moment


@dataclass(frozen=True, slots=True)
class Do:
    """One operation of a work.

    ``kind``: a method of the store; ``kill``, a write that is killed before its last chunk;
    ``mkdir`` and ``left``, which another program does; ``no links``, as some file systems.
    ``between``: what happens in its middle.  ``by``: which of two stores does it.
    """

    kind: str
    name: str = ""
    size: int = 0
    between: Sequence[Do] = ()
    by: int = 0
    origin: str = ""


class Killed(BaseException):
    """A writer is dead; what it has not finished stays."""


class Recorder:
    """A directory that is a store; ``steps`` are its changes, ``calls`` what the store promises."""

    def __init__(self, root: Path) -> None:
        self.root, self.steps, self.calls = root, list[Step](), list[Call]()
        self._numbers = {root.stat().st_ino: 0}
        self._open_files = list[int]()  # an inode that is open is no other file's later
        self._os = {name: getattr(os, name) for name in _CHANGES}
        self._has_links = True

    def record(self, work: Sequence[Do]) -> None:
        """Do a work, and record it."""
        takers = {name: partial(self._take_name, name) for name in ("unlink", "rmdir")}
        patches: Any = {n: takers.get(n) or getattr(self, f"_{n}") for n in _CHANGES}
        rename_if_free = partial(self._rename_if_free, publish.rename_if_free)
        with (
            mock.patch.multiple(os, **patches),
            mock.patch.object(publish, "rename_if_free", rename_if_free),
        ):
            stores = PosixStore(str(self.root)), PosixStore(str(self.root))
            for operation in work:
                self._do(stores, operation)
        for fd in self._open_files:
            os.close(fd)

    def _do(self, stores: Sequence[PosixStore], do: Do) -> None:
        store, size, path = stores[do.by], do.size, self.root / do.name
        if do.kind == "no links":
            self._has_links = False
            return
        if do.kind == "mkdir":
            path.mkdir()
            return
        data = None if do.kind == "delete" else random.Random(len(self.calls)).randbytes(size)
        call = Call(do.name, data, len(self.steps))
        self.calls.append(call)
        if data is None:
            store.delete(do.name)
        elif do.kind == "left":  # by a writer that was killed after `link`: the bytes are durable
            fd = os.open(part := path.with_name(".ckptsync-left.part"), os.O_WRONLY | os.O_CREAT)
            os.pwrite(fd, data, 0)
            os.fsync(fd)
            os.close(fd)
            self._link(part, path, is_refused=False)
            return
        else:
            half = size // 2 // 4096 * 4096

            def chunks() -> Iterator[bytes]:
                yield data[:half]
                for other in do.between:
                    self._do(stores, other)
                if do.kind == "kill":
                    raise Killed
                yield data[half:]

            put = store.create if do.kind == "create" else store.write
            try:
                put(do.name, chunks(), About(size, do.origin))
                assert read_all(store, do.name) == data, "it promised too much without a power cut"
            except Exists:
                call.is_told = True
            except Killed:
                return
        call.ended = len(self.steps)

    def _inode(self, fd: int) -> int | None:
        return self._numbers.get(os.fstat(fd).st_ino)

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int | None, str]:
        """Return the directory of a path, None if it is not below the root, and the last name."""
        folder, _, name = os.fsdecode(path).rpartition("/")
        if not folder and dir_fd is not None:
            return self._inode(dir_fd), name
        return self._numbers.get(os.stat(folder or "/", dir_fd=dir_fd).st_ino), name

    def _named(self, path: Any, dir_fd: int | None, gone: str = "") -> None:
        """Record that a path is the name of what is there."""
        directory, name = self._place(path, dir_fd)
        if directory is not None:
            inode = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino
            if inode not in self._numbers:
                self._numbers[inode] = len(self._numbers)
                self._open_files.append(self._os["open"](path, os.O_RDONLY, dir_fd=dir_fd))
            self.steps.append(Names(directory, gone, name, self._numbers[inode]))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = False
        if flags & os.O_CREAT:
            try:
                os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                is_new = True
        fd: int = self._os["open"](path, flags, mode, dir_fd=dir_fd)
        assert not flags & os.O_TRUNC, "not known to this simulation"
        if is_new:
            self._named(path, dir_fd)
        return fd

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._os["mkdir"](path, mode, dir_fd=dir_fd)
        self._named(path, dir_fd)

    def _take_name(self, call: str, path: Any, *, dir_fd: int | None = None) -> None:
        directory, name = self._place(path, dir_fd)
        self._os[call](path, dir_fd=dir_fd)
        if directory is not None:
            self.steps.append(Names(directory, gone=name))

    def _rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self._os["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._named(dst, dst_dir_fd, gone=os.fsdecode(src))

    def _rename_if_free(
        self, rename: Callable[[int, str, str], None], directory_fd: int, part: str, last: str
    ) -> None:
        rename(directory_fd, part, last)
        self._named(last, directory_fd, gone=part)

    def _link(self, src: Any, dst: Any, *, is_refused: bool = True, **options: Any) -> None:
        if is_refused and not self._has_links:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self._os["link"](src, dst, **options)
        self._named(dst, options.get("dst_dir_fd"))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count: int = self._os["pwrite"](fd, data, offset)
        if (inode := self._inode(fd)) is not None:
            self.steps.append(Data(inode, offset, bytes(data[:count])))
        return count

    def _ftruncate(self, fd: int, length: int) -> None:
        self._os["ftruncate"](fd, length)
        if (inode := self._inode(fd)) is not None:
            self.steps.append(Data(inode, length, None))

    def _fsync(self, fd: int) -> None:
        if (inode := self._inode(fd)) is not None:
            self.steps.append(Sync(inode, _caller_of_sync()))


def _caller_of_sync() -> str:
    """Return the code that calls fsync, such as ``secure < _begin``: innermost first, without the
    store's own wrapper around the call.
    """
    frame: Any = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < 2:
        if frame.f_code.co_name not in ("sync_directory", "sync"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " < ".join(names)


def at_random(seed: str) -> list[Do]:
    """Return a work of two writers, few names, anything in the middle of anything."""
    dice = random.Random(seed)
    names = ["a", "run/a", "run/b", "run/dir/c", "other/d"]

    def drawn(by: int, depth: int = 0) -> Iterator[Do]:
        name, size = dice.choice(names), dice.choice([0, 10, 9000])
        kind = dice.choice(("delete", "create", "write", "write", "kill"))
        is_split = depth < 1 and dice.random() < 0.4
        between = [*drawn(1 - by, depth + 1)] if is_split else []
        if kind == "kill":
            yield Do(kind, name, size, by=by, origin="us")
            kind = "write"
        yield Do(kind, name, size, between, by, "us")

    return [operation for _ in range(12) for operation in drawn(dice.randrange(2))]


_WRITE_A = Do("write", "run/a", 100)
_LEFT = [Do("left", "run/b", 10)]
WORKS: Mapping[str, Sequence[Do]] = {
    "several_names": [
        Do("write", "run/checkpoint-1/a", 100),
        Do("write", "run/checkpoint-1/b", LARGE),
        Do("create", "run/.ckptsync/locations/record", 50),
        Do("write", "top", 10),
        Do("write", "run/empty", 0),
    ],
    "overwriting": [Do("write", "run/a", size) for size in (5000, 100, LARGE, 0, 7)],
    "deleting": [
        Do("write", "run/dir/a", 100),
        Do("write", "run/dir/b", 100),
        Do("delete", "run/dir/a"),
        Do("delete", "run/dir/b"),
        Do("write", "run/dir/a", 200),
        Do("delete", "never/there"),
    ],
    # one begins and ends in the middle of the other, in one directory and under one name
    "two_writers": [
        Do("write", "run/a", 9000, [Do("write", "run/b", 100, by=1)]),
        Do("write", "run/c", 9000, [Do("write", "run/c", 100, by=1)]),
        Do("create", "run/new/d", 9000, [Do("create", "run/new/d", 100, by=1)]),
        Do("create", "run/e", 9000, [Do("delete", "run/b", by=1)]),
    ],
    # another writer made the directory a moment ago, and was killed before it was durable
    "directory_of_another": [Do("mkdir", "run"), _WRITE_A],
    # another one deletes the directory that was durable, and somebody makes it again
    "directory_made_again": [
        _WRITE_A,
        Do("delete", "run/a", by=1),
        Do("mkdir", "run"),
        Do("write", "run/b", 100),
    ],
    # who is told that a name is taken relies on it, although its writer was killed
    "name_of_another": [_WRITE_A, *_LEFT, Do("create", "run/b", 20)],
    "name_taken_meanwhile": [_WRITE_A, Do("create", "run/b", 9000, _LEFT)],
    # a file system without hard links claims names by another system call
    "without_links": [
        Do("no links"),
        Do("create", "run/a", 100),
        Do("create", "run/b", 9000, _LEFT),
    ],
    # a writer is killed, and another goes on where it stopped
    "continued": [
        Do(kind, "run/a", 2 * LARGE, origin="node/a/1") for kind in ("kill", "kill", "write")
    ],
}
CONTENDED = frozenset({"two_writers", "name_taken_meanwhile", "without_links", "continued"})
"""Works in which some fsyncs do not matter: of who is killed, of who is told Exists, and of who
works in the middle of another.
"""
