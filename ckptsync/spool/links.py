"""A pin's files: hard links as they appear, reflinks once the save is finished, and copies where neither can be.

A hard link follows a file that is still being written, and shares the fate of one that is written again in place; a reflink
does neither.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from ckptsync.errors import ConfigError, Incomplete, StoreError
from ckptsync.spool.folders import NO_LINKS, Tree, copy_of, link, refusals, unlink
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat, look, open_file, opened_parent

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on


def grow(pin: Pin, source: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Pin what has appeared; the names that this file system cannot link are returned, those that vanished are not.

    Raises ConfigError where files belong to another user, StoreError where the disk refuses.
    """
    refused = []
    is_another = False
    with refusals(pin.path), Tree(pin.root) as tree:
        for name in names:
            if not _link(tree, source, name):
                refused.append(name)
            elif not is_another:
                _forget(pin)
                is_another = True
    return tuple(refused)


def harden(pin: Pin) -> None:
    """Turn links into reflinks where the file system has them: from here on no writer reaches the pinned bytes."""
    for file in pin.files:
        if not _cloned(pin, file):
            return


def trim(pin: Pin, names: Iterable[str]) -> None:
    """Let go of names that the trainer itself took back."""
    with refusals(pin.path):
        _forget(pin)
        for name in names:
            unlink(pin.root / name)


def _forget(pin: Pin) -> None:
    """What was said of other files than it will hold."""
    for name in ("stored", "took.json"):
        unlink(pin.path / name)


def _link(tree: Tree, source: Path, name: str) -> bool:
    target, new = tree.place(name)
    try:
        with opened_parent(source, name) as (parent, last):
            link(parent, last, target, new)
    except (FileNotFoundError, FileExistsError, Incomplete):  # rotation was quicker, or it is pinned already
        return True
    except OSError as e:
        if e.errno in NO_LINKS or (e.errno == errno.EPERM and _is_ours(source, name)):
            return False
        _refuse_link(e, f"{source}/{name}")
    return True


def _is_ours(source: Path, name: str) -> bool:
    """EPERM on a file of our own means that the file system has no links (vfat, some FUSE)."""
    try:
        return (source / name).lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True  # vanished: whose it was does not matter


def _refuse_link(error: OSError, path: str) -> None:
    if error.errno in (errno.EPERM, errno.EACCES):
        raise ConfigError(
            f"{path}: may not be linked by uid {os.geteuid()}, which does not own it",
            hint="run the worker as the user who trains (fs.protected_hardlinks refuses everyone else)",
        ) from error
    raise error


def _cloned(pin: Pin, file: Stat) -> bool:
    """Whether ``file`` is a reflink from here on.  One that changed meanwhile stays a link: the take will notice."""
    fd = open_file(pin.root, file.path)
    try:
        with refusals(pin.path), Tree(pin.root) as tree, copy_of(fd, pin.path, *tree.place(file.path)) as out:
            fcntl.ioctl(out.fileno(), _FICLONE, fd)
            os.utime(out.fileno(), ns=(file.mtime, file.mtime))
            if look(fd, file.path) != file:
                out.close()
    except StoreError:
        return False  # a file system without reflinks; the link does
    finally:
        os.close(fd)
    return True
