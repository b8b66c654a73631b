"""What the simulated power cuts interrupt: a store at work, which says before and after each call
what it promises.

    python -m tests.campaigns.crash_work WORK DIRECTORY

runs one of `WORKS` in an empty directory.  Standard output takes the marks
(`tests.campaigns.crash_trace` reads them out of the system calls): ``begin``, ``done`` and, before
each fsync, where in the code it is.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ckptsync.errors import Exists
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.posix.store import PosixStore

LARGE = (300 << 10) + 5  # written past the cache, where there is a disk; its last bytes through it


def content(seed: int, size: int) -> bytes:
    """Bytes that are no other seed's."""
    return random.Random(seed).randbytes(size)


def mark(**said: object) -> None:
    """One mark, in one system call."""
    os.write(1, json.dumps(said).encode() + b"\n")


class Writer:
    """A store, and what is said of each call to it."""

    def __init__(self, root: str, first: int = 0) -> None:
        self.store, self._next = PosixStore(root), first

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
        mark(done=call)

    def killed(self, name: str, size: int, origin: str) -> None:
        """A writer that dies before its last chunk."""
        pid = os.fork()
        if not pid:
            self.write(name, size, origin=origin, between=lambda: os._exit(0))
        os.waitpid(pid, 0)

    def _begin(self, **said: object) -> int:
        self._next += 1
        mark(begin=self._next, **said)
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
            mark(exists=call)
            return
        assert read_all(self.store, name) == data, "else it promised too much without any power cut"
        mark(done=call)


def left_by_another(root: str, name: str, size: int) -> None:
    """What a writer leaves that is killed after `link`: the bytes are durable, and the name is
    there, but not for sure.
    """
    data, path = content(999, size), Path(root, name)
    mark(begin=999, kind="put", name=name, seed=999, size=size)
    fd = os.open(path.with_name(".ckptsync-left.part"), os.O_WRONLY | os.O_CREAT)
    os.write(fd, data)
    _fsync(fd)
    os.close(fd)
    os.link(path.with_name(".ckptsync-left.part"), path)


def several_names(root: str) -> None:
    one = Writer(root)
    one.write("run/checkpoint-1/a", 100)
    one.write("run/checkpoint-1/b", LARGE)
    one.create("run/.ckptsync/locations/record", 50)
    one.write("top", 10)
    one.write("run/empty", 0)


def overwriting(root: str) -> None:
    one = Writer(root)
    for size in (5000, 100, LARGE, 0, 7):
        one.write("run/a", size)


def deleting(root: str) -> None:
    one = Writer(root)
    one.write("run/dir/a", 100)
    one.write("run/dir/b", 100)
    one.delete("run/dir/a")
    one.delete("run/dir/b")
    one.write("run/dir/a", 200)
    one.delete("never/there")


def two_writers(root: str) -> None:
    """One begins and ends in the middle of the other, in the same directory and under the same
    name.
    """
    one, other = Writer(root), Writer(root, 100)
    one.write("run/a", 9000, between=partial(other.write, "run/b", 100))
    one.write("run/c", 9000, between=partial(other.write, "run/c", 100))
    one.create("run/new/d", 9000, between=partial(other.create, "run/new/d", 100))
    one.create("run/e", 9000, between=partial(other.delete, "run/b"))


def directory_of_another(root: str) -> None:
    """Another writer made the directory a moment ago, and was killed before it was durable."""
    Path(root, "run").mkdir()
    Writer(root).write("run/a", 100)


def directory_made_again(root: str) -> None:
    """Another one deletes the directory that was durable, and somebody makes it again."""
    one = Writer(root)
    one.write("run/a", 100)
    Writer(root, 100).delete("run/a")
    Path(root, "run").mkdir()
    one.write("run/b", 100)


def name_of_another(root: str) -> None:
    """Who is told that a name is taken may rely on it, although its writer was killed: seen at
    once, and by the link alone.
    """
    one = Writer(root)
    one.write("run/a", 10)
    left_by_another(root, "run/b", 10)
    one.create("run/b", 20)


def name_taken_meanwhile(root: str) -> None:
    one = Writer(root)
    one.write("run/a", 10)
    one.create("run/b", 9000, between=partial(left_by_another, root, "run/b", 10))


def without_links(root: str) -> None:
    """A file system that has no hard links claims names by another system call."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    link, os.link = os.link, refused
    one = Writer(root)
    one.create("run/a", 100)

    def taken() -> None:
        os.link = link
        left_by_another(root, "run/b", 10)
        os.link = refused

    one.create("run/b", 9000, between=taken)


def continued(root: str) -> None:
    """A writer is killed, and another goes on where it stopped."""
    one = Writer(root)
    one.killed("run/a", 2 * LARGE, "node/a/1")
    one.killed("run/a", 2 * LARGE, "node/a/1")
    one.write("run/a", 2 * LARGE, origin="node/a/1")


def at_random(root: str, seed: str) -> None:
    """Two writers, few names, anything in the middle of anything."""
    dice = random.Random(seed)
    writers = (Writer(root), Writer(root, 100))
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


WORKS: Mapping[str, Callable[[str], None]] = {
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
_fsync = os.fsync


def where() -> str:
    """The code that calls fsync, such as ``secure < _begin``: innermost first, without the store's
    own wrapper around the call.
    """
    frame: Any = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < 3:
        if frame.f_code.co_name not in ("sync_directory", "sync"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " < ".join(names[:2])


def main(work: str, root: str) -> None:
    name, _, seed = work.partition(" ")

    def fsync(fd: Any) -> None:
        mark(fsync=where())
        _fsync(fd)

    os.fsync = fsync
    at_random(root, seed) if seed else WORKS[name](root)


if __name__ == "__main__":
    main(*sys.argv[1:])
