"""What simulated power cuts interrupt: a store at work, whose every change of a file is recorded.

A `Recorded` replaces the functions of ``os`` that change files while it is open.  Inodes are
numbers, 0 is the store's root, whose own location is durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes at a location of a file; ``data`` ends the file there if it is ``None``."""

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


@dataclass(frozen=True, slots=True)
class Mark:
    """What a store promises: ``begin``, ``done`` or ``exists`` of a call."""

    said: dict[str, Any]


Step = Data | Names | Sync | Mark


class Recorded:
    """A directory; ``steps`` are its changes while it is open."""

    def __init__(self, root: Path) -> None:
        self.root, self.steps = root, list[Step]()
        self._numbers = {root.stat().st_ino: 0}
        self._kept = list[int]()  # an inode that is open is no other file's later
        self._os = {name: getattr(os, name) for name in _CHANGES}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Record what this process does meanwhile."""
        with mock.patch.multiple(os, **{name: getattr(self, f"_{name}") for name in _CHANGES}):
            rename = publish.rename_if_free
            with mock.patch.object(
                publish, "rename_if_free", partial(self._rename_if_free, rename)
            ):
                yield
        for fd in self._kept:
            os.close(fd)

    def mark(self, **said: object) -> None:
        """Record what is promised."""
        self.steps.append(Mark(said))

    def in_child(self, work: Callable[[Callable[[], None]], None]) -> None:
        """Let a child work; it dies when it calls its argument."""
        source, target = os.pipe()
        if not os.fork():
            begun = len(self.steps)

            def die() -> None:
                with os.fdopen(target, "wb") as pipe:
                    pickle.dump((self.steps[begun:], self._numbers), pipe)
                os._exit(0)

            work(die)
        os.close(target)
        with os.fdopen(source, "rb") as pipe:
            steps, self._numbers = pickle.load(pipe)
        os.wait()
        self.steps += steps
        for path in self.root.rglob("*"):
            self._kept.append(self._os["open"](path, os.O_RDONLY))

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
                self._kept.append(self._os["open"](path, os.O_RDONLY, dir_fd=dir_fd))
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

    def _gone(self, call: str, path: Any, dir_fd: int | None) -> None:
        directory, name = self._place(path, dir_fd)
        self._os[call](path, dir_fd=dir_fd)
        if directory is not None:
            self.steps.append(Names(directory, gone=name))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", path, dir_fd)

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

    def _link(self, src: Any, dst: Any, **options: Any) -> None:
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
            self.steps.append(Sync(inode, _where()))


_CHANGES = ("open", "mkdir", "unlink", "rmdir", "rename", "link", "pwrite", "ftruncate", "fsync")


def _where() -> str:
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


def content(seed: int, size: int) -> bytes:
    """Return bytes that are no other seed's."""
    return random.Random(seed).randbytes(size)


class Writer:
    """A store in a recorded directory, and what is promised of each call to it."""

    def __init__(self, recorded: Recorded, first: int = 0) -> None:
        self._recorded, self._next = recorded, first
        self.store = PosixStore(str(recorded.root))

    def write(
        self,
        name: str,
        size: int,
        *,
        origin: str = "",
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self._put(self.store.write, name, size, origin, between)

    def create(self, name: str, size: int, *, between: Callable[[], object] = lambda: None) -> None:
        self._put(self.store.create, name, size, "", between)

    def delete(self, name: str) -> None:
        call = self._begin(kind="delete", name=name)
        self.store.delete(name)
        self._recorded.mark(done=call)

    def killed(self, name: str, size: int, origin: str) -> None:
        """A writer that dies before its last chunk."""
        self._recorded.in_child(lambda die: self.write(name, size, origin=origin, between=die))

    def _begin(self, **said: object) -> int:
        self._next += 1
        self._recorded.mark(begin=self._next, **said)
        return self._next

    def _put(
        self,
        put: Callable[..., None],
        name: str,
        size: int,
        origin: str,
        between: Callable[[], object],
    ) -> None:
        call = self._begin(kind="put", name=name, seed=self._next, size=size)
        data = content(call - 1, size)

        def chunks() -> Iterator[bytes]:
            half = size // 2 // 4096 * 4096
            yield data[:half]
            between()
            yield data[half:]

        try:
            put(name, chunks(), About(size, origin))
        except Exists:
            self._recorded.mark(exists=call)
            return
        assert read_all(self.store, name) == data, "else it promised too much without any power cut"
        self._recorded.mark(done=call)


def left_by_another(recorded: Recorded, name: str, size: int) -> None:
    """What a writer leaves that is killed after `link`: the bytes are durable, and the name is
    there, but not for sure.
    """
    path = recorded.root / name
    recorded.mark(begin=999, kind="put", name=name, seed=999, size=size)
    fd = os.open(path.with_name(".ckptsync-left.part"), os.O_WRONLY | os.O_CREAT)
    os.pwrite(fd, content(999, size), 0)
    os.fsync(fd)
    os.close(fd)
    os.link(path.with_name(".ckptsync-left.part"), path)


def several_names(store: Recorded) -> None:
    one = Writer(store)
    one.write("run/checkpoint-1/a", 100)
    one.write("run/checkpoint-1/b", LARGE)
    one.create("run/.ckptsync/locations/record", 50)
    one.write("top", 10)
    one.write("run/empty", 0)


def overwriting(store: Recorded) -> None:
    one = Writer(store)
    for size in (5000, 100, LARGE, 0, 7):
        one.write("run/a", size)


def deleting(store: Recorded) -> None:
    one = Writer(store)
    one.write("run/dir/a", 100)
    one.write("run/dir/b", 100)
    one.delete("run/dir/a")
    one.delete("run/dir/b")
    one.write("run/dir/a", 200)
    one.delete("never/there")


def two_writers(store: Recorded) -> None:
    """One begins and ends in the middle of the other, in the same directory and under the same
    name.
    """
    one, other = Writer(store), Writer(store, 100)
    one.write("run/a", 9000, between=partial(other.write, "run/b", 100))
    one.write("run/c", 9000, between=partial(other.write, "run/c", 100))
    one.create("run/new/d", 9000, between=partial(other.create, "run/new/d", 100))
    one.create("run/e", 9000, between=partial(other.delete, "run/b"))


def directory_of_another(store: Recorded) -> None:
    """Another writer made the directory a moment ago, and was killed before it was durable."""
    (store.root / "run").mkdir()
    Writer(store).write("run/a", 100)


def directory_made_again(store: Recorded) -> None:
    """Another one deletes the directory that was durable, and somebody makes it again."""
    one = Writer(store)
    one.write("run/a", 100)
    Writer(store, 100).delete("run/a")
    (store.root / "run").mkdir()
    one.write("run/b", 100)


def name_of_another(store: Recorded) -> None:
    """Who is told that a name is taken may rely on it, although its writer was killed: seen at
    once, and by the link alone.
    """
    one = Writer(store)
    one.write("run/a", 10)
    left_by_another(store, "run/b", 10)
    one.create("run/b", 20)


def name_taken_meanwhile(store: Recorded) -> None:
    one = Writer(store)
    one.write("run/a", 10)
    one.create("run/b", 9000, between=partial(left_by_another, store, "run/b", 10))


def without_links(store: Recorded) -> None:
    """A file system that has no hard links claims names by another system call."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    link, os.link = os.link, refused
    one = Writer(store)
    one.create("run/a", 100)

    def taken() -> None:
        os.link = link
        left_by_another(store, "run/b", 10)
        os.link = refused

    one.create("run/b", 9000, between=taken)


def continued(store: Recorded) -> None:
    """A writer is killed, and another goes on where it stopped."""
    one = Writer(store)
    one.killed("run/a", 2 * LARGE, "node/a/1")
    one.killed("run/a", 2 * LARGE, "node/a/1")
    one.write("run/a", 2 * LARGE, origin="node/a/1")


def at_random(store: Recorded, seed: str) -> None:
    """Two writers, few names, anything in the middle of anything."""
    dice = random.Random(seed)
    writers = (Writer(store), Writer(store, 100))
    names = ["a", "run/a", "run/b", "run/dir/c", "other/d"]

    def step(depth: int) -> None:
        one, name, size = writers[depth % 2], dice.choice(names), dice.choice([0, 10, 9000])
        between = partial(step, depth + 1) if depth < 1 and dice.random() < 0.4 else lambda: None
        kind = dice.randrange(5)
        if kind == 0:
            one.delete(name)
        elif kind == 4:
            one.killed(name, size, "us")
            one.write(name, size, origin="us", between=between)
        elif kind == 1:
            one.create(name, size, between=between)
        else:
            one.write(name, size, between=between)

    for _ in range(12):
        step(dice.randrange(2))


WORKS: Mapping[str, Callable[[Recorded], None]] = {
    work.__name__: work
    for work in (
        several_names,
        overwriting,
        deleting,
        two_writers,
        directory_of_another,
        directory_made_again,
        name_of_another,
        name_taken_meanwhile,
        without_links,
        continued,
    )
}
CONTENDED = frozenset({"two_writers", "name_taken_meanwhile", "without_links", "continued"})
"""Works in which some fsyncs do not matter: of who is killed, of who is told Exists, and of who
works in the middle of another.
"""


def recorded(name: str, root: Path) -> list[Step]:
    """Do a work in an empty directory; return its steps.  ``at_random N`` is drawn by a seed."""
    store, (work, _, seed) = Recorded(root), name.partition(" ")
    with store.opened():
        if seed:
            at_random(store, seed)
        else:
            WORKS[work](store)
    return store.steps
