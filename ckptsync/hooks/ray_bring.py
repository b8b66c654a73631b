"""What was reported and lies in a store, back on a disk: ``with as_directory(ray.train.get_checkpoint()) as folder``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptsync.catalogue.fresh import fresh_location, hidden_by
from ckptsync.config import loading
from ckptsync.config.loading import from_environment
from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_note import Note
from ckptsync.pull.download import Download
from ckptsync.pull.plan import Plan, plan_checkpoint
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located

_OURS = f"ckptsync-ray-{os.getuid()}-"  # begins the name of this user's directory, which ends in letters of chance
_WHOLE, _LOCK = ".whole", "lock"


@contextlib.contextmanager
def as_directory(checkpoint: Any) -> Iterator[str]:
    """As Ray's own ``Checkpoint.as_directory``, also of one that is in a store: all ranks' parts, every byte proven on its way.

    The ranks of a node have one directory: the first brings it, the last takes it away.  Raises Incomplete if not all of it can be had, what `ckptsync.pull`
    raises, and OSError.
    """
    note = ray_note.read(checkpoint)
    if note is None:
        with checkpoint.as_directory() as local:
            yield local
        return
    home = _ours() / digest(ray_note.encode(note))[:16]
    with _shared(home, note):
        yield str(home / note.checkpoint)


def _ours() -> Path:
    """A directory that is this user's alone, the same for all ranks of a node: where the temporary directory is everybody's, no fixed name can be relied on there."""
    shared = tempfile.gettempdir()
    if not _found(shared):
        tempfile.mkdtemp(prefix=_OURS, dir=shared)
    return _found(shared)[0]  # of two that were made at once


def _found(shared: str) -> list[Path]:
    with os.scandir(shared) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.name.startswith(_OURS) and _is_ours(entry))


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        info = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
    return False


@contextlib.contextmanager
def _shared(home: Path, note: Note) -> Iterator[None]:
    with _alone(home.parent):
        if not _is_whole(home):
            _bring_anew(home, note)
        used = _opened(home)
        fcntl.flock(used, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with _alone(home.parent):
            os.close(used)
            _remove_unused(home)


@contextlib.contextmanager
def _alone(ours: Path) -> Iterator[None]:
    """Of all this user's processes on the node; the others wait."""
    lock = os.open(ours / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_whole(home: Path) -> bool:
    """Whether all of it has been brought: somebody will unpickle it."""
    return (home / _WHOLE).exists()


def _bring_anew(home: Path, note: Note) -> None:
    for left in home.parent.iterdir():  # by ranks that were killed
        if left.name != _LOCK:
            _remove_unused(left)
    home.mkdir(mode=0o700)
    try:
        bring(note, home)
        (home / _WHOLE).touch()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _remove_unused(home: Path) -> None:
    with contextlib.suppress(OSError):  # gone, or nobody's directory of ours: what cannot be removed is in nobody's way
        used = _opened(home)
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            pass  # somebody else is there, and will do it
        finally:
            os.close(used)


def _opened(home: Path) -> int:
    return os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def bring(note: Note, home: Path) -> Path:
    """All of it, in a directory below ``home``."""
    access = reached()
    store = opened(note, access)
    plan = _plan(store, note)
    done = Download(home, plan).run(store, threads=access.limits.threads)
    missing = [*plan.missing, *(f"{path}: {error}" for path, error in sorted(done.failed.items()))]
    if missing:
        raise Incomplete(
            f"{note.url}: not all of its files could be downloaded: {'; '.join(missing[:3])}",
            hint="`ckptsync verify` says what is damaged",
        )
    return done.directory


def _plan(store: Store, note: Note) -> Plan:
    """Of this very location: another save of the same name may be newer, and is not what was reported."""
    found = fresh_location(store, note.run, note.location)
    for fault in found.faults:
        if hidden_by([fault]):
            raise fault.error
    seen = found.of(note.run, note.location)
    if seen is None:
        raise Incomplete(f"{note.url}: no manifest of it counts", hint="the store's retention may have let it go: `ckptsync ls`")
    if seen.status == "CONFLICT":
        raise Corrupt(f"{note.url}: nobody can say which of its files are of one save: {'; '.join(seen.evidence[:1])}")
    return plan_checkpoint(seen)


def opened(note: Note, access: Access) -> Store:
    """The store that a note names.  Raises ConfigError, StoreError."""
    location = located(note.store)
    return open_store(note.store, access.options_of(location) if isinstance(location, Remote) else {}, access.limits)


def reached() -> Access:
    """How stores are reached, as this process's environment says (docs/cli.md); raises ConfigError."""
    options, asked = from_environment()
    return Access(options, loading.limits_of(asked))
