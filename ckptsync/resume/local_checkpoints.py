"""What lies in an output directory before a training begins: what is whole, and what goes aside.

Nothing is deleted.  What the training must not take for its newest checkpoint is renamed into
``<output_dir>/_ckptsync-aside/``, where no trainer looks: some read the number in
``checkpoint-900.old``, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.checkpoint_dirs import (
    ASIDE,
    FINAL,
    CheckpointDir,
    find_checkpoint_dirs,
    series_and_step,
)
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.layouts import registry
from ckptsync.resume.choose import Candidate, WholeSave
from ckptsync.spool.markers import begun, is_training
from ckptsync.spool.pins import list_pins
from ckptsync.stores.posix.publish import sync_directory
from ckptsync.walk import SPOOL, UnsafeSpool
from ckptsync.worker.finished import Rule, judge, may_be_alone
from ckptsync.worker.local_save import LocalSave, count_ranks
from ckptsync.worker.observation import (
    find_surroundings,
    fingerprint,
    is_like_another,
    observe,
)
from ckptsync.worker.push import Offer, offered_saves

STAGING = ".ckptsync-resume"
"""The directory of checkpoints that were downloaded, and take their place once all are ready."""
_RULE = Rule()
# No training writes here yet: what would be finished after this long at rest, without a doubt, is.
_AT_REST = _RULE.unmarked


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint in the output directory, and its path.

    ``torn``: why no waiting makes it a finished save.  ``lacking``: why it is not whole here, else.
    Both are empty where it is whole.
    """

    save: WholeSave
    path: Path
    torn: str = ""
    lacking: str = ""

    @property
    def is_whole(self) -> bool:
        """Return whether a training could begin with it."""
        return not (self.torn or self.lacking)


def check_idle(output_dir: Path) -> None:
    """Raise ConfigError where the hook of a training on this machine still writes here."""
    for one in begun(output_dir / SPOOL):
        if is_training(one):  # None: of another machine, nobody can tell
            raise ConfigError(
                f"{output_dir}: a training writes here (process {one.pid})",
                hint="wait until it has ended, or stop it",
            )


def judge_output_dir(output_dir: Path, node: str) -> tuple[LocalCheckpoint, ...]:
    """Return the checkpoints in an output directory, and which are finished and whole.

    The worker's rules judge, as if nothing had changed for a minute.  Raises ConfigError or
    StoreError where the directory cannot be read.
    """
    if not output_dir.is_dir():
        return ()
    dirs = tuple(one for one in find_checkpoint_dirs(output_dir) if _can_move(one))
    offer = Offer("", output_dir, dirs)
    with contextlib.suppress(UnsafeSpool):  # the checkpoints are what they are
        offer = Offer("", output_dir, dirs, list_pins(output_dir))
    saves = [one for one in offered_saves(offer, node) if not one.files.gone]
    around = find_surroundings(output_dir, saves, [one.checkpoint for one in saves])
    spool, found = output_dir / SPOOL, []
    for one in saves:
        torn = lacking = ""
        try:
            observed = observe(one, around)
            if may_be_alone(observed, _RULE):  # then other checkpoints decide
                observed = replace(observed, alike=is_like_another(one, saves))
            judgement = judge(observed, _AT_REST, _RULE)
            torn = judgement.reason if judgement.left is None else ""
            lacking = _lacking(one, spool) if judgement.finished else judgement.reason
        except (Corrupt, Incomplete, Unsupported) as e:
            lacking = str(e)
        files = one.files.stats
        number = f"local-{fingerprint(files):x}"
        written = max((f.mtime for f in files), default=0) / 1e9
        where = one.checkpoint_dir
        path = where.path / where.only[0] if where.only else where.path
        save = WholeSave(one.checkpoint, number, written)
        found.append(LocalCheckpoint(save, path, torn, lacking))
    return tuple(found)


def _can_move(one: CheckpointDir) -> bool:
    """Return whether a checkpoint is one directory, or one file, with a step in its name."""
    is_one = one.only is None or len(one.only) == 1
    return one.family != FINAL and is_one and series_and_step(one.name)[1] is not None


def _lacking(one: LocalSave, spool: Path) -> str:
    """Return what a training that resumes needs, and what is not in the directory itself."""
    if pinned := [path for path, held in one.files.by_path.items() if held.is_pinned]:
        return f"{pinned[0]} is only in a pin"
    demands = registry.demands(one.files, one.files.by_path, count_ranks(one, spool))
    sizes = one.files.sizes()
    for path, size in {**demands.model, **demands.resume}.items():
        if path not in sizes:
            return f"{path} is missing"
        if size not in (None, sizes[path]):
            return f"{path} has {sizes[path]} bytes, not {size}"
    return ""


def list_newer(
    here: Iterable[LocalCheckpoint], choice: Candidate | None
) -> tuple[LocalCheckpoint, ...]:
    """Return what a training that begins with ``choice`` must not find: newer, or torn.

    Steps are compared between names of one series.  Where it begins from the beginning, all is
    newer.
    """
    series, step = series_and_step(choice.checkpoint) if choice else ("", None)
    found = []
    for one in here:
        own_series, own_step = series_and_step(one.save.checkpoint)
        is_newer = choice is None or (
            own_series == series and own_step is not None and step is not None and own_step > step
        )
        is_chosen = choice is not None and one.save.checkpoint == choice.checkpoint
        if is_newer or (one.torn and not is_chosen):
            found.append(one)
    return tuple(found)


def move_aside(output_dir: Path, paths: Sequence[Path]) -> list[Path]:
    """Rename checkpoints into the directory of what is aside; return their new paths.

    One that is gone meanwhile is left out.  Raises StoreError.
    """
    moved = []
    with _reported(output_dir):
        for path in paths:
            name = ".".join(path.relative_to(output_dir).parts)
            target, number = output_dir / ASIDE / name, 1
            target.parent.mkdir(exist_ok=True)
            while os.path.lexists(target):
                number += 1
                target = target.with_name(f"{name}.{number}")
            try:
                path.rename(target)
            except FileNotFoundError:
                continue
            moved.append(target)
        for folder in {path.parent for path in (*paths, *moved)}:
            _sync(folder)
    return moved


def put_in_place(staged: Path, final: Path) -> None:
    """Rename a downloaded checkpoint to its place, unless another node has.  Raises StoreError."""
    with _reported(final):
        with contextlib.suppress(FileNotFoundError):
            staged.rename(final)
        _sync(final.parent)


def inode(path: Path | None) -> tuple[int, int] | None:
    """Return device and inode of what is at a path, no link followed; None if nothing is."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = path.lstat()
            return info.st_dev, info.st_ino
    return None


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold the lock of an output directory, which nodes may share, while its names change.

    A file system without locks is no error.  Raises StoreError.
    """
    with _reported(output_dir):
        fd = os.open(output_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def staging_of(output_dir: Path, save_id: str) -> Path:
    """Return where a save is downloaded to while another one has its place."""
    return output_dir / STAGING / save_id


def remove_staging(output_dir: Path) -> None:
    """Remove what downloads have left that were not put in their places; all of it is stored."""
    shutil.rmtree(output_dir / STAGING, ignore_errors=True)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_directory(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except CkptsyncError:
        raise
    except OSError as e:
        raise StoreError(
            f"{e.filename or path}: {(e.strerror or str(e)).lower()}",
            hint="check free space and permissions of the output directory",
        ) from e
