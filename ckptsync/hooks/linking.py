"""Second names for a save's files, made in the training process: links, else reflinks, else copies that a thread makes later.

A link costs some µs whatever the file's size, and rotation then takes only the trainer's own name.  Where the spool is another file
system there are no links: the files are opened, which keeps their bytes from rotation, and copied beside the training.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool.folders import opened_like
from ckptsync.walk import Stat, look

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_NEVER = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})  # said of one file, true of all of a file system
_STRETCH = 8 * 1024 * 1024  # bytes between two looks at whether the file is still the same
_open: set[int] = set()


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that is still to be copied from an open descriptor."""

    descriptor: int
    target: Path
    file: Stat


@dataclass(slots=True)
class _Ways:
    """What may still be possible between these two file systems."""

    links: bool = True
    reflinks: bool = True


def link(source: Path, files: Iterable[Stat], target: Path) -> list[Copy]:
    """Names below ``target`` for these files of ``source``; what could not be linked comes back open.  Raises OSError, or Incomplete."""
    copies: list[Copy] = []
    made, ways = {target}, _Ways()
    target.mkdir(parents=True)
    try:
        for file in files:
            name = target / file.path
            if name.parent not in made:
                name.parent.mkdir(parents=True, exist_ok=True)
                made.add(name.parent)
            if not (ways.links and _is_linked(source / file.path, name, ways)):
                copies += _reflinked_or_open(source / file.path, name, file, ways)
    except BaseException:
        close(copies)
        raise
    return copies


def copy(copies: Iterable[Copy]) -> None:
    """Make the copies, with their times.  Raises OSError, or Incomplete where the trainer wrote a file again meanwhile."""
    for one in copies:
        _copy(one)


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


def _is_linked(file: Path, name: Path, ways: _Ways) -> bool:
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError as e:
        if e.errno in _NO_LINKS:
            ways.links = e.errno not in _NEVER
            return False
        raise
    return True


def _reflinked_or_open(path: Path, name: Path, file: Stat, ways: _Ways) -> list[Copy]:
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    kept = False
    try:
        if not stat.S_ISREG(os.fstat(source).st_mode):
            raise Incomplete(f"{path}: no longer a regular file")
        if ways.reflinks and _is_reflinked(source, name, file, ways):
            return []
        kept = True
        _open.add(source)
        return [Copy(source, name, file)]
    finally:
        if not kept:
            os.close(source)


def _is_reflinked(source: int, name: Path, file: Stat, ways: _Ways) -> bool:
    with opened_like(name, source) as out:
        try:
            fcntl.ioctl(out.fileno(), _FICLONE, source)
        except OSError as e:
            ways.reflinks = e.errno not in _NEVER
            return False  # a copy does the same
        os.utime(out.fileno(), ns=(file.mtime, file.mtime))
    return True


def _copy(one: Copy) -> None:
    with opened_like(one.target, one.descriptor) as out:
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
