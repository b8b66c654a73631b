"""A pin's files: hard links as they appear, reflinks once the save is settled, and copies where neither can be.

A hard link follows a file that is still being written, and shares the fate of one that is written again in place; a reflink
does neither.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ckptsync.errors import ConfigError, Incomplete, StoreError
from ckptsync.spool.folders import NO_LINKS, opened_like, refusals
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat, look, open_file, opened_parent

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on


def grow(pin: Pin, source: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Pin what has appeared; the names that this file system cannot link are returned, those that vanished are not.

    Raises ConfigError where files belong to another user, StoreError where the disk refuses.
    """
    refused = []
    is_another = False
    for name in names:
        if not _link(pin, source, name):
            refused.append(name)
        elif not is_another:
            _forget(pin)
            is_another = True
    return tuple(refused)


def prepared(path: Path, name: str) -> Path:
    """Where a file's name in a pin belongs, with its folders; raises OSError if the pin has gone, and makes none of it again."""
    target = path / "files"
    for part in ("", *name.split("/")[:-1]):
        target /= part
        target.mkdir(exist_ok=True)
    return target / name.rpartition("/")[2]


def harden(pin: Pin) -> None:
    """Turn links into reflinks where the file system has them: from here on no writer reaches the pinned bytes."""
    for file in pin.files:
        if not _cloned(pin, file):
            return


def trim(pin: Pin, names: Iterable[str]) -> None:
    """Let go of names that the trainer itself took back."""
    _forget(pin)
    with refusals(pin.path):
        for name in names:
            (pin.root / name).unlink(missing_ok=True)


def _forget(pin: Pin) -> None:
    """What was said of other files than it will hold."""
    with refusals(pin.path):
        for name in ("stored", "took.json"):
            (pin.path / name).unlink(missing_ok=True)


def _link(pin: Pin, source: Path, name: str) -> bool:
    with refusals(pin.path):
        target = prepared(pin.path, name)
        try:
            with opened_parent(source, name) as (parent, last):
                os.link(last, target, src_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, FileExistsError, Incomplete):  # rotation was quicker, or it is pinned already
            return True
        except OSError as e:
            if e.errno in NO_LINKS or (e.errno == errno.EPERM and _is_ours(source, name)):
                return False
            _refuse_link(e, f"{source}/{name}")
        if not stat.S_ISREG(target.lstat().st_mode):  # a link took the file's place since we looked
            target.unlink()
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
    fresh = pin.path / ".clone"
    fd = open_file(pin.root, file.path)
    try:
        with refusals(pin.path), opened_like(fresh, fd) as out:
            fcntl.ioctl(out.fileno(), _FICLONE, fd)
            os.utime(out.fileno(), ns=(file.mtime, file.mtime))
        if look(fd, file.path) == file:
            fresh.replace(pin.root / file.path)
    except StoreError:
        return False  # a file system without reflinks; the link does
    finally:
        os.close(fd)
        fresh.unlink(missing_ok=True)
    return True
