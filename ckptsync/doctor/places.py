"""An output directory: whether the worker can take what the trainer writes there, and whether there is room for more."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.doctor import pacing
from ckptsync.doctor.findings import SETUP, STORAGE, Finding
from ckptsync.errors import CkptsyncError
from ckptsync.scan import Found, found, spots
from ckptsync.stores.mounts import mount_of
from ckptsync.units import show_duration, show_size
from ckptsync.walk import OURS
from ckptsync.watch import is_blind

_PINS = "a pin is a hard link: without it rotation takes the checkpoint before it is sent"
_AS_TRAINER = "run the worker as the user who trains (docs/service.md)"
FSTAB = Path("/etc/fstab")
_LATEST = 60.0  # seconds that NFS may hide what is new by its own defaults
_LEAST = 256 << 20  # bytes that any checkpoint takes, where nothing is known
_LOOKED_AT = 2000  # files of a checkpoint


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: the node, and the user whose rights count.  ``expected``: bytes of a checkpoint, where none is there yet; ``rate``: bytes a second that may be sent."""

    node: str
    uid: int
    expected: int = 0
    rate: float | None = None


def wrong(path: Path, asked: Asked) -> Iterator[Finding]:
    """What is wrong with an output directory that is there."""
    try:
        owner = path.stat().st_uid
    except OSError as e:
        yield _fail(
            "output-unreadable",
            asked,
            path,
            _words(e),
            "the worker sees nothing of this run",
            "look at the directories above it",
            code=STORAGE,
        )
        return
    if asked.uid not in (0, owner):
        what = f"is {_name(owner)}'s, the worker is {_name(asked.uid)}"
        why = "safetensors 0.8 and newer write files that only their owner reads (0600), and fs.protected_hardlinks refuses links to them"
        yield _fail("other-user", asked, path, what, why, _AS_TRAINER)
    elif asked.uid == 0 and owner:
        why = "root may read and link everything: what the worker itself may, is not tried by this"
        yield _warn(
            "asked-as-root", asked, path, f"is {_name(owner)}'s, asked by root", why, f"sudo -u {_name(owner)} ckptsync doctor …"
        )
    yield from unmounted(path, asked)
    yield from mounted(path, asked)
    yield from unheard(path, asked)
    yield from _links(path, asked)
    newest, before = last_two(path)
    yield from _files(path, newest, asked)
    yield from space(path, newest, asked)
    if newest and before:
        yield from pacing.slow(newest, before, asked.rate, (asked.node,), str(path))


def is_there(path: Path) -> bool:
    """Whether it is a directory, or may be one: what cannot be reached is looked at, which says why."""
    try:
        return path.is_dir()
    except OSError:
        return True


def unmounted(path: Path, asked: Asked) -> Iterator[Finding]:
    """A file system that fstab(5) puts above it, and that is not there."""
    try:
        lines = FSTAB.read_text("utf-8", "replace").splitlines()
    except OSError:
        return  # nothing is said of mounts
    fields = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    points = {Path(field[1]) for field in fields if len(field) > 2 and field[1].startswith("/") and field[1] != "/"}
    for point in sorted(points & {path, *path.parents}):
        if not point.is_mount():
            why = "what is written goes to this machine's own disk: no other node sees it, and the mount will hide it"
            yield _fail(
                "not-mounted",
                asked,
                path,
                f"{point} is in {FSTAB}, and nothing is mounted there",
                why,
                f"mount {point}",
                code=STORAGE,
            )


def mounted(path: Path, asked: Asked) -> Iterator[Finding]:
    """What kind of file system it is on; a store's directory may be asked, too."""
    mount = mount_of(str(path))
    for option in ("soft", "softerr"):
        if option in mount.options:
            why = "when the server does not answer in time, writes are given up: a file that was closed without an error may lack bytes (nfs(5))"
            yield _warn("nfs-soft", asked, path, f"{mount.kind}, mounted {option}", why, "mount it hard", code=STORAGE)
    if mount.late > _LATEST:
        what = f"{mount.kind}: what other machines write may be seen {show_duration(mount.late)} later"
        yield _warn(
            "late-names",
            asked,
            path,
            what,
            "so long nothing is said to be missing, and all that waits for it waits",
            "mount it with actimeo=60 or less",
            code=STORAGE,
        )


def unheard(path: Path, asked: Asked) -> Iterator[Finding]:
    """An output directory of which the kernel tells no events."""
    mount = mount_of(str(path))
    if is_blind(mount.kind):
        why = "the worker looks every few seconds instead of at once: a checkpoint that rotates sooner is lost without the hook"
        yield _warn(
            "no-events",
            asked,
            path,
            f"on {mount.kind}, which tells no events",
            why,
            "use the hook (docs/hook.md), or a local disk",
            code=STORAGE,
        )


def _links(path: Path, asked: Asked) -> Iterator[Finding]:
    """From the directory itself into its spool, as a pin would be made."""
    spool = path / OURS
    try:
        spool.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".ckptsync-doctor-") as source:
            target = spool / Path(source.name).name
            os.link(source.name, target)
            target.unlink()
    except OSError as e:
        if e.errno == errno.EXDEV:
            what = f"{OURS} is another file system, or another mount of it"
            yield _fail(
                "links-cross",
                asked,
                path,
                what,
                _PINS,
                f"remove the mount or link {spool}; of a service's view: ReadWritePaths above both",
                code=STORAGE,
            )
        elif e.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            yield _fail(
                "no-links",
                asked,
                path,
                f"hard links are refused: {_words(e)}",
                _PINS,
                "use a file system that has them (ext4, xfs, btrfs, NFS)",
                code=STORAGE,
            )
        elif e.errno in (errno.ENOSPC, errno.EDQUOT):
            yield _full(asked, path, _words(e))
        else:
            hint = "mount it for writing" if e.errno == errno.EROFS else _AS_TRAINER
            yield _fail(
                "output-not-writable",
                asked,
                path,
                f"nothing can be written: {_words(e)}",
                "there is no place for pins and marks",
                hint,
            )


def last_two(path: Path) -> tuple[Found | None, Found | None]:
    """The newest checkpoint that has files, and the one before it."""
    try:
        looked = [found(spot) for spot in spots(path)]
    except CkptsyncError:
        return None, None  # `_files` says what cannot be read
    dated = sorted((one for one in looked if one.files), key=lambda one: max(file.mtime for file in one.files))
    return (dated[-1] if dated else None, dated[-2] if len(dated) > 1 else None)


def _files(path: Path, newest: Found | None, asked: Asked) -> Iterator[Finding]:
    """Whether what the trainer wrote last can be read, and linked."""
    if newest is None:
        with contextlib.suppress(OSError):
            list(path.iterdir())
            return
        yield _fail("output-unreadable", asked, path, "cannot be listed", "the worker sees nothing of this run", _AS_TRAINER)
        return
    for file in newest.files[:_LOOKED_AT]:
        one = newest.path / file.path
        try:
            os.close(os.open(one, os.O_RDONLY | os.O_NOFOLLOW))
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as e:
            yield _fail(
                "unreadable",
                asked,
                one,
                f"{_words(e)}: mode {one.lstat().st_mode & 0o777:04o}, of {_name(one.lstat().st_uid)}",
                "it cannot be sent",
                _AS_TRAINER,
            )
            return
    yield from _linkable(path, newest, asked)


def _linkable(path: Path, newest: Found, asked: Asked) -> Iterator[Finding]:
    one = newest.path / newest.files[0].path
    target = path / OURS / f".doctor-{os.getpid()}"
    try:
        os.link(one, target, follow_symlinks=False)
        target.unlink()
    except PermissionError as e:
        why = "fs.protected_hardlinks refuses links to files of others that one may not write"
        yield _fail("unlinkable", asked, one, f"may not be linked: {_words(e)}", f"{_PINS}; {why}", _AS_TRAINER)
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
    if not wanted and free < _LEAST:
        yield _full(asked, path, f"{show_size(free)} free")
    elif free < 2 * wanted:
        of = f"as {newest.name}" if newest else "as its configuration lets expect, if all of the model is trained"
        what = f"{show_size(free)} free, a checkpoint takes {show_size(wanted)} ({of}), room for two is wanted"
        finding = _full(asked, path, what)
        yield finding if newest else replace(finding, level="warn")
    files = len(newest.files) if newest else 0
    if there.f_files and inodes < 2 * files + 100:
        why = "the trainer fails in the middle of a save with `No space left on device`, while there are bytes left"
        yield _fail(
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
    return _fail("disk-full", asked, path, what, why, "make room, lower save_total_limit, or save elsewhere", code=STORAGE)


def _words(e: OSError) -> str:
    return (e.strerror or str(e)).lower()


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _fail(kind: str, asked: Asked, path: Path, *told: str, code: int = SETUP) -> Finding:
    what, why, hint = told
    return Finding("fail", kind, (asked.node,), str(path), what, why, hint, code)


def _warn(kind: str, asked: Asked, path: Path, *told: str, code: int = SETUP) -> Finding:
    return replace(_fail(kind, asked, path, *told, code=code), level="warn")
