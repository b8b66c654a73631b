"""Merging on local disks: checkpoints in, a directory out that appears by rename, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ckptsync.errors import ConfigError, StoreError
from ckptsync.merge.consolidate import Chunk, Engine, Merged, Progress, Write, carry_out
from ckptsync.merge.copying import Work
from ckptsync.merge.dated import check_dates
from ckptsync.merge.looking import Asked, Prepared, check_apart, look
from ckptsync.merge.one_save import Judge, check_unchanged
from ckptsync.merge.plan import Options
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.trees import Access


def prepare_local(
    sources: Sequence[Path],
    destination: Path,
    options: Options,
    config_from: Path | None = None,
    *,
    judge: Judge = check_dates,
) -> Prepared:
    """Look at everything, the files' times too (``judge``), and plan.  Raises ConfigError, Incomplete, Unsupported or Corrupt."""
    asked = Asked(sources, destination, options, config_from)
    check_free(asked)
    return look(asked, Access(), judge)


def merge_local(
    sources: Sequence[Path],
    destination: Path,
    options: Options,
    config_from: Path | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Consolidate the checkpoint that ``sources`` (one directory a node) are parts of into the new directory ``destination``."""
    return carry_out_local(prepare_local(sources, destination, options, config_from), progress)


def carry_out_local(
    prepared: Prepared, progress: Progress | None = None, work: Work | None = None, engine: Callable[[Path], Engine] | None = None
) -> Merged:
    """Write it, with an ``engine`` that is told the directory to write to; raises Incomplete if a source changed meanwhile, and then nothing appears."""
    destination = prepared.destination
    assert isinstance(destination, Path)
    with _appearing(destination) as (directory, at):
        write = _writing(directory, at, destination)
        merged = carry_out(prepared.job, prepared.files, write, progress, work, engine=engine and engine(directory))
        check_unchanged(prepared.trees)
    return merged


def check_free(asked: Asked) -> None:
    """Raise ConfigError if there is something where the new directory is to be, or if that is inside a source."""
    destination = asked.destination
    assert isinstance(destination, Path)
    if destination.is_symlink() or (destination.exists() and (not destination.is_dir() or any(destination.iterdir()))):
        raise ConfigError(f"{destination}: exists", hint="name a new directory: nothing is ever overwritten")
    check_apart(asked)


@contextlib.contextmanager
def _appearing(destination: Path) -> Iterator[tuple[Path, int]]:
    """A directory to work in, and it open, beside ``destination``, that becomes it at the end or leaves nothing."""
    work = destination.parent / f".{destination.name}.ckptsync-{secrets.token_hex(4)}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        try:
            at = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield work, at
            finally:
                os.close(at)
            work.rename(destination)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        _sync(destination.parent)
    except OSError as e:
        raise StoreError(f"{destination}: {(e.strerror or str(e)).lower()}", hint="is there room, and permission to write?") from e


def _writing(work: Path, at: int, destination: Path) -> Write:
    """Writes below ``work``, which is open as ``at``: who owns the directory above may put another in its place; a full disk is said of ``destination``, which is what the operator knows."""
    store = PosixStore(str(work), at=at)

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        try:
            store.write(name, chunks)
        except StoreError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreError(
                f"{destination}/{e}", hint="make room, or name a directory elsewhere; nothing was left behind"
            ) from e.__cause__

    return write


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
