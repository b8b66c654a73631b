"""Second names for a save's files, made in the training process: links, else reflinks, else copies that a thread makes later.

A link costs some µs whatever the file's size, and rotation then takes only the trainer's own name.  Where the spool is another file
system there are no links: the files are opened, which keeps their bytes from rotation, and copied beside the training.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool import folders
from ckptsync.spool.folders import Tree, make, make_new
from ckptsync.walk import Stat, look, open_in, opened_parent

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_NEVER = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})  # said of one file, true of all of a file system
_STRETCH = 8 * 1024 * 1024  # bytes between two looks at whether the file is still the same
_open: set[int] = set()


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that is still to be copied from an open descriptor, to its name in a pin's ``files``; ``pin`` is not yet in anybody's sight."""

    descriptor: int
    pin: Path
    file: Stat


@dataclass(slots=True)
class _Ways:
    """What may still be possible between these two file systems."""

    links: bool = True
    reflinks: bool = True


def link(source: Path, files: Iterable[Stat], pin: Path) -> list[Copy]:
    """Names in a new ``pin`` for these files of ``source``; what could not be linked comes back open.  Raises OSError, Incomplete, ConfigError."""
    copies: list[Copy] = []
    ways = _Ways()
    make(pin.parent)
    make_new(pin)
    try:
        with Tree(pin / "files") as tree:
            for file in files:
                with opened_parent(source, file.path) as (parent, name):
                    if not (ways.links and _is_linked(parent, name, tree.place(file.path), ways)):
                        copies += _reflinked_or_open(open_in(parent, name, source, file.path), Copy(-1, pin, file), tree, ways)
    except BaseException:
        close(copies)
        raise
    return copies


def copy(copies: Sequence[Copy]) -> None:
    """Make the copies, with their times.  Raises OSError, or Incomplete where the trainer wrote a file again meanwhile."""
    for one in copies:
        with Tree(one.pin / "files") as tree:
            _copy(one, tree)


def close(copies: Iterable[Copy]) -> None:
    """Let go of the files, copied or not."""
    for one in copies:
        _open.discard(one.descriptor)
        os.close(one.descriptor)


def _let_go_in_child() -> None:
    """Processes that read data are forked at any moment, and may live as long as the training: what rotation takes would fill the disk."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _is_linked(source: int, name: str, target: tuple[int, str], ways: _Ways) -> bool:
    try:
        folders.link(source, name, *target)
    except OSError as e:
        if e.errno in _NO_LINKS:
            ways.links = e.errno not in _NEVER
            return False
        raise
    return True


def _reflinked_or_open(source: int, one: Copy, tree: Tree, ways: _Ways) -> list[Copy]:
    kept = False
    try:
        if ways.reflinks and _is_reflinked(source, one, tree, ways):
            return []
        kept = True
        _open.add(source)
        return [replace(one, descriptor=source)]
    finally:
        if not kept:
            os.close(source)


def _is_reflinked(source: int, one: Copy, tree: Tree, ways: _Ways) -> bool:
    try:
        with folders.copy_of(source, one.pin, *tree.place(one.file.path)) as out:
            fcntl.ioctl(out.fileno(), _FICLONE, source)
            os.utime(out.fileno(), ns=(one.file.mtime, one.file.mtime))
    except OSError as e:
        ways.reflinks = e.errno not in _NEVER
        return False  # a copy does the same, or says what is wrong
    return True


def _copy(one: Copy, tree: Tree) -> None:
    with folders.copy_of(one.descriptor, one.pin, *tree.place(one.file.path)) as out:
        done = 0
        while done < one.file.size:
            sent = os.sendfile(out.fileno(), one.descriptor, done, min(_STRETCH, one.file.size - done))
            if not sent:
                break
            done += sent
        now = look(one.descriptor, one.file.path)
        if (now.size, now.mtime) != (one.file.size, one.file.mtime):
            raise Incomplete(f"{one.file.path}: written again while it was copied")
        os.utime(out.fileno(), ns=(one.file.mtime, one.file.mtime))


def gently() -> None:
    """Let the calling thread stand behind those that train."""
    with contextlib.suppress(OSError):  # a container may forbid it; then it is as quick as they are
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux a thread has a priority of its own
