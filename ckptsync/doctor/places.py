"""An output directory: whether the worker can take what the trainer writes there, and whether there is room for more."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckptsync.doctor import mounting, pacing
from ckptsync.doctor.asking import Asked, fail, user, warn, words
from ckptsync.doctor.findings import STORAGE, Finding
from ckptsync.errors import CkptsyncError
from ckptsync.scan import Found, found, spots
from ckptsync.units import show_size
from ckptsync.walk import OURS

_PINS = "a pin is a hard link: without it rotation takes the checkpoint before it is sent"
_AS_TRAINER = "run the worker as the user who trains (docs/service.md)"
_LEAST = 256 << 20  # bytes that any checkpoint takes, where nothing is known
_NOTHING = 1 << 20  # bytes that are as good as none
_LOOKED_AT = 2000  # files of a checkpoint
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TRIAL = ".ckptsync-doctor-"  # begins the name of a file that is tried


def wrong(path: Path, asked: Asked) -> Iterator[Finding]:
    """What is wrong with an output directory that is there."""
    try:
        path.stat()
    except OSError as e:
        why = "the worker sees nothing of this run"
        yield fail("output-unreadable", asked, path, words(e), why, "look at the directories above it", code=STORAGE)
        return
    newest, before = last_two(path)
    yield from _of_another(path, newest, asked)
    yield from mounting.unmounted(path, asked)
    yield from mounting.mounted(path, asked)
    yield from mounting.unheard(path, asked)
    refused = [*_links(path, asked), *_files(path, newest, asked)]
    yield from refused
    if newest and not refused:
        yield from _linkable(path, newest, asked)
    yield from space(path, newest, asked)
    if newest and before:
        yield from pacing.slow(newest, before, asked.rate, (asked.node,), str(path))


def _of_another(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whose training it is: who wrote the newest checkpoint, whose files are tried then; before the first, whose the directory is, unless it is root's and for all."""
    made = _made(path)
    try:
        owner = (newest.path / newest.files[0].path if newest else path).lstat().st_uid
    except OSError:
        return  # rotated meanwhile
    if owner in (asked.uid, made):
        return
    what = f"is {user(owner)}'s, "
    if asked.uid == 0:
        why = "root may read and link everything: what the worker itself may, is not tried by this"
        yield warn("asked-as-root", asked, path, f"{what}asked by root", why, f"sudo -u {user(owner)} ckptsync doctor …")
    elif not newest and (owner or made is None):
        why = "safetensors 0.8 and newer write files that only their owner reads (0600), and fs.protected_hardlinks refuses links to them"
        yield fail("other-user", asked, path, f"{what}the worker is {user(asked.uid)}", why, _AS_TRAINER)


def _made(path: Path) -> int | None:
    """Whose a file is that is made there, which servers and mounts may decide; ``None`` where none can be made."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path, prefix=_TRIAL) as one:
        return os.fstat(one.fileno()).st_uid
    return None


def is_there(path: Path) -> bool:
    """Whether it is a directory, or may be one: what cannot be reached is looked at, which says why."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _links(path: Path, asked: Asked) -> Iterator[Finding]:
    """From the directory itself into its spool, as a pin would be made."""
    spool = path / OURS
    try:
        _make(spool)
        with tempfile.NamedTemporaryFile(dir=path, prefix=_TRIAL) as source:
            yield from _linked(Path(source.name), spool, asked)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            yield _full(asked, path, words(e))
            return
        what, why = f"nothing can be written: {words(e)}", "there is no place for pins and marks"
        yield fail("output-not-writable", asked, path, what, why, "mount it for writing" if e.errno == errno.EROFS else _AS_TRAINER)


def _linked(source: Path, spool: Path, asked: Asked) -> Iterator[Finding]:
    try:
        os.link(source, spool / source.name)
        (spool / source.name).unlink()
    except OSError as e:
        if e.errno == errno.EXDEV:
            what = f"{OURS} is another file system, or another mount of it"
            hint = f"remove the mount or link {spool}; of a service's view: ReadWritePaths above both"
            yield fail("links-cross", asked, spool.parent, what, _PINS, hint, code=STORAGE)
        elif e.errno in _NO_LINKS:
            hint = "use a file system that has them (ext4, xfs, btrfs, NFS)"
            yield fail("no-links", asked, spool.parent, f"hard links are refused: {words(e)}", _PINS, hint, code=STORAGE)
        else:
            raise


def _make(spool: Path) -> None:
    """By root as its output directory's owner would, who must be able to write there."""
    with contextlib.suppress(FileExistsError):
        spool.mkdir()
        above = spool.parent.stat()
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # where root is nobody, as on NFS, nobody has made it
                os.chown(spool, above.st_uid, above.st_gid)


def last_two(path: Path) -> tuple[Found | None, Found | None]:
    """The newest checkpoint that has files, and the one before it."""
    try:
        looked = [found(spot) for spot in spots(path)]
    except CkptsyncError:
        return None, None  # `_files` says what cannot be read
    dated = sorted((one for one in looked if one.files), key=lambda one: max(file.mtime for file in one.files))
    return (dated[-1] if dated else None, dated[-2] if len(dated) > 1 else None)


def _files(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whether what the trainer wrote last can be read."""
    if newest is None:
        with contextlib.suppress(OSError):
            list(path.iterdir())
            return
        yield fail("output-unreadable", asked, path, "cannot be listed", "the worker sees nothing of this run", _AS_TRAINER)
        return
    for file in newest.files[:_LOOKED_AT]:
        one = newest.path / file.path
        try:
            os.close(os.open(one, os.O_RDONLY | os.O_NOFOLLOW))
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as e:
            yield fail(
                "unreadable",
                asked,
                one,
                f"{words(e)}: mode {one.lstat().st_mode & 0o777:04o}, of {user(one.lstat().st_uid)}",
                "it cannot be sent",
                _AS_TRAINER,
            )
            return


def _linkable(path: Path, newest: Found, asked: Asked) -> Iterator[Finding]:
    one = newest.path / newest.files[0].path
    target = path / OURS / f".doctor-{os.getpid()}"
    try:
        os.link(one, target, follow_symlinks=False)
        target.unlink()
    except PermissionError as e:
        why = "fs.protected_hardlinks refuses links to files of others that one may not write"
        yield fail("unlinkable", asked, one, f"may not be linked: {words(e)}", f"{_PINS}; {why}", _AS_TRAINER)
    except OSError:
        return  # `_links` has said what is wrong, or it was rotated meanwhile


def size(checkpoint: Found) -> int:
    """Bytes of all that is there of it."""
    return sum(file.size for file in checkpoint.files)


def space(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """For two checkpoints as large as the newest, or as is expected."""
    try:
        there = os.statvfs(path)
    except OSError:
        return  # said by who reads it
    wanted = size(newest) if newest else asked.expected
    free, inodes = there.f_bavail * there.f_frsize, there.f_favail
    if not there.f_blocks:
        return  # programs behind FUSE may not tell
    if not wanted and free < _LEAST:
        finding = _full(asked, path, f"{show_size(free)} free")
        yield finding if free < _NOTHING else replace(finding, level="warn")
    elif free < 2 * wanted:
        of = f"as {newest.name}" if newest else "as its configuration lets expect, if all of the model is trained"
        what = f"{show_size(free)} free, a checkpoint takes {show_size(wanted)} ({of}), room for two is wanted"
        finding = _full(asked, path, what)
        yield finding if newest else replace(finding, level="warn")
    files = len(newest.files) if newest else 0
    if there.f_files and inodes < 2 * files + 100:
        why = "the trainer fails in the middle of a save with `No space left on device`, while there are bytes left"
        yield fail(
            "inodes",
            asked,
            path,
            f"{inodes} inodes free, {2 * files + 100} wanted",
            why,
            "remove small files, or make a file system with more",
            code=STORAGE,
        )


def _full(asked: Asked, path: Path, what: str) -> Finding:
    why = "a save that does not fit is torn, and the trainer ends with it; rotation removes the old one only afterwards"
    return fail("disk-full", asked, path, what, why, "make room, lower save_total_limit, or save elsewhere", code=STORAGE)
