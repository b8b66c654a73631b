"""Pins: names of our own for a checkpoint's files, so that the trainer's rotation takes only its own.

    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/owner.json    who sends it; its mtime is the owner's pulse
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/files/…       hard links, or reflinks once the checkpoint is settled

A hard link follows a file that is still being written, and shares the fate of one that is written again in place; a reflink
does neither.  Everything here may be deleted at any moment: what is lost is time, and what rotation has deleted.  Nothing is ever
written in a checkpoint's own directory.  A pin appears with its owner in it, by one rename, so that exactly one node has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import ConfigError, Incomplete, StoreError
from ckptsync.walk import OURS, Stat, look, open_file, opened_parent, walk

_NAME = re.compile(r"(.+)\.([0-9]{1,9})")
_FICLONE = 0x40049409  # _IOW(0x94, 9, int), the same on every Linux we run on
_NO_LINKS = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Pin:
    """``files`` lie below ``path / "files"``.  ``pulse`` (ns, the file system's clock) changes as long as ``node`` is alive."""

    checkpoint: str
    k: int
    node: str
    pulse: int
    path: Path
    files: tuple[Stat, ...] = ()

    @property
    def root(self) -> Path:
        """Where the pinned files lie, under their own names."""
        return self.path / "files"


@dataclass(frozen=True, slots=True)
class Relation:
    """A pin beside its source, by name: one file under both, another file, only in the source, only in the pin."""

    same: tuple[str, ...]
    changed: tuple[str, ...]
    new: tuple[str, ...]
    vanished: tuple[str, ...]


def compare(pinned: Iterable[Stat], source: Iterable[Stat]) -> Relation:
    """How a pin stands to its source; every name is in exactly one of the four."""
    ours, theirs = {s.path: s for s in pinned}, {s.path: s for s in source}
    both = sorted(ours.keys() & theirs.keys())
    return Relation(
        tuple(p for p in both if ours[p].is_file_of(theirs[p])),
        tuple(p for p in both if not ours[p].is_file_of(theirs[p])),
        tuple(sorted(theirs.keys() - ours.keys())),
        tuple(sorted(ours.keys() - theirs.keys())),
    )


def pins(output_dir: Path) -> tuple[Pin, ...]:
    """Every pin in an output directory, by checkpoint and number."""
    found = (_pin(path) for path in _children(output_dir / OURS / "pins"))
    return tuple(sorted((p for p in found if p is not None), key=lambda p: (p.checkpoint, p.k)))


def open_pin(output_dir: Path, checkpoint: str, k: int, node: str) -> Pin | None:
    """An empty pin of our own; ``None`` if another was first."""
    folder = output_dir / OURS / "pins"
    with _refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".new-{node}-{checkpoint}"
        _remove(fresh)
        fresh.mkdir()
        _write_owner(fresh, node)
        return _pin(folder / f"{checkpoint}.{k}") if _renamed(fresh, folder / f"{checkpoint}.{k}") else None


def claim(pin: Pin, node: str) -> Pin | None:
    """The pin of a node that is dead, with its files, as our own; ``None`` if another was first, or it has gone."""
    taken = pin.path.with_name(f".new-{node}-{pin.checkpoint}")
    with _refusals(pin.path):
        _remove(taken)
        if not _renamed(pin.path, taken):
            return None
        _write_owner(taken, node)
        return _pin(pin.path) if _renamed(taken, pin.path) else None


def grow(pin: Pin, source: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Pin what has appeared; the names that this file system cannot link are returned, those that vanished are not.

    Raises ConfigError where files belong to another user, StoreError where the disk refuses.
    """
    return tuple(name for name in names if not _link(pin, source, name))


def harden(pin: Pin) -> None:
    """Turn links into reflinks where the file system has them: from here on no writer reaches the pinned bytes."""
    for file in pin.files:
        if not _cloned(pin, file):
            return


def trim(pin: Pin, names: Iterable[str]) -> None:
    """Let go of names that the trainer itself took back."""
    with _refusals(pin.path):
        for name in names:
            (pin.root / name).unlink(missing_ok=True)


def drop(pin: Pin) -> None:
    """Let go of a whole pin; it is gone at once, its files a moment later."""
    gone = pin.path.with_name(f".gone-{pin.node}-{pin.path.name}")
    with _refusals(pin.path):
        _remove(gone)
        if _renamed(pin.path, gone):
            _remove(gone)


def pulse(pin: Pin) -> None:
    """Show the other nodes on this output directory that the pin's owner lives."""
    with contextlib.suppress(Incomplete), _refusals(pin.path):  # `_ckptsync` may be deleted at any moment
        os.utime(pin.path / "owner.json")


def free_bytes(output_dir: Path) -> int:
    """What the trainer could still write; raises Incomplete if the directory is gone."""
    with _refusals(output_dir):
        return shutil.disk_usage(output_dir).free


def sweep(output_dir: Path, node: str) -> None:
    """Remove what this node left half done; call it before anything else of the same node runs."""
    for path in _children(output_dir / OURS / "pins"):
        if path.name.startswith((f".new-{node}-", f".gone-{node}-")):
            with _refusals(path):
                _remove(path)


def _pin(path: Path) -> Pin | None:
    named = _NAME.fullmatch(path.name)
    if named is None or path.name.startswith("."):
        return None
    try:
        with _refusals(path):
            owner = json.loads((path / "owner.json").read_bytes())["node"]
            beat = (path / "owner.json").stat().st_mtime_ns
    except (Incomplete, ValueError, KeyError, TypeError):  # dropped meanwhile, or not of our making: no pin of ours has no owner
        return None
    return Pin(named[1], int(named[2]), str(owner), beat, path, walk(path / "files").files)


def _link(pin: Pin, source: Path, name: str) -> bool:
    target = pin.root / name
    with _refusals(pin.path):
        pin.path.lstat()  # so that a deleted pin is not made again without its owner
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with opened_parent(source, name) as (parent, last):
                os.link(last, target, src_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, FileExistsError, Incomplete):  # rotation was quicker, or it is pinned already
            return True
        except OSError as e:
            if e.errno in _NO_LINKS or (e.errno == errno.EPERM and _is_ours(source, name)):
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
        with _refusals(pin.path), fresh.open("wb") as out:
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


def _write_owner(folder: Path, node: str) -> None:
    fresh = folder / ".owner"
    fresh.write_text(json.dumps({"node": node}) + "\n")
    fresh.replace(folder / "owner.json")


def _renamed(path: Path, target: Path) -> bool:
    """Whether we moved it: not if somebody stands there already (a directory with its owner is never empty), nor if it is gone."""
    try:
        path.rename(target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return False
        raise
    return True


def _children(folder: Path) -> list[Path]:
    """None where nothing was ever pinned, or somebody deleted it."""
    with contextlib.suppress(Incomplete), _refusals(folder):
        return sorted(folder.iterdir())
    return []


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as e:
        raise ConfigError(f"{path}: may not be written by uid {os.geteuid()}", hint="run the worker as the user who trains") from e
    except (FileNotFoundError, NotADirectoryError) as e:
        raise Incomplete(f"{path}: gone", hint="it is made again with the next look") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint="look at the disk that the trainer writes to") from e
