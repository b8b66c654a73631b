"""Find the whole checkpoints of an output directory, and move others aside before a training.

A trainer takes the directory with the greatest step for its newest checkpoint, also if it is torn
or newer than the one agreed on.  Nothing is deleted: such directories are renamed into
``<output_dir>/_ckptsync-aside/``.  No trainer looks there; some would read the number in
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
from ckptsync.spool.markers import is_training, list_training_processes
from ckptsync.spool.pins import list_pins
from ckptsync.stores.posix.publish import sync_path
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
# seconds; no training writes here yet, so every save is judged as if unchanged for this long
_AT_REST = _RULE.unmarked


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint in the output directory, and its path.

    ``torn``: why it can never become a finished save.  ``lacking``: any other reason why it is not
    whole in this directory.  Both are empty for a whole checkpoint.
    """

    save: WholeSave
    path: Path
    torn: str = ""
    lacking: str = ""

    @property
    def is_whole(self) -> bool:
        """Return whether a training could begin with this checkpoint."""
        return not (self.torn or self.lacking)


def check_idle(output_dir: Path) -> None:
    """Raise ConfigError if the hook's marks show that a training of this machine writes here."""
    for process in list_training_processes(output_dir / SPOOL):
        if is_training(process):  # None: it is of another machine, so its state is not known
            raise ConfigError(
                f"{output_dir}: a training writes here (process {process.pid})",
                hint="wait until it has ended, or stop it",
            )


def judge_output_dir(output_dir: Path, node: str) -> tuple[LocalCheckpoint, ...]:
    """Return the movable checkpoints of a directory (`_is_movable`), each with why it is not whole.

    Empty without the directory.  Checkpoints that only a pin has are left out.  The worker's rules
    judge, as if nothing had changed for a minute.  ``node``: the id under which this machine pins.
    Raises ConfigError or StoreError if the directory cannot be read.
    """
    if not output_dir.is_dir():
        return ()
    dirs = tuple(filter(_is_movable, find_checkpoint_dirs(output_dir)))
    offer = Offer("", output_dir, dirs)
    with contextlib.suppress(UnsafeSpool):  # then no pins, but the checkpoints still count
        offer = Offer("", output_dir, dirs, list_pins(output_dir))
    saves = [listed for listed in offered_saves(offer, node) if not listed.files.is_gone]
    around = find_surroundings(output_dir, saves, [listed.checkpoint for listed in saves])
    spool, checkpoints = output_dir / SPOOL, []
    for listed in saves:
        torn = lacking = ""
        try:
            observed = observe(listed, around)
            if may_be_alone(observed, _RULE):  # then the other checkpoints decide
                observed = replace(observed, has_similar=is_like_another(listed, saves))
            judgement = judge(observed, _AT_REST, _RULE)
            torn = judgement.reason if judgement.remaining is None else ""
            lacking = _lacking(listed, spool) if judgement.finished else judgement.reason
        except (Corrupt, Incomplete, Unsupported) as e:
            lacking = str(e)
        files = listed.files.stats
        local_id = f"local-{fingerprint(files):x}"
        written = max((f.mtime for f in files), default=0) / 1e9
        directory = listed.checkpoint_dir
        path = directory.path / directory.only[0] if directory.only else directory.path
        save = WholeSave(listed.checkpoint, local_id, written)
        checkpoints.append(LocalCheckpoint(save, path, torn, lacking))
    return tuple(checkpoints)


def _is_movable(directory: CheckpointDir) -> bool:
    """Return whether a checkpoint is one path, with a step in its name, and no final model."""
    is_one_path = directory.only is None or len(directory.only) == 1
    has_step = series_and_step(directory.name)[1] is not None
    return directory.family != FINAL and is_one_path and has_step


def _lacking(save: LocalSave, spool: Path) -> str:
    """Return what resuming needs and the directory itself lacks, as a phrase; empty if nothing.

    A file is only in a pin, missing, or of another size than the layout demands.  Reads metadata;
    raises Corrupt, Unsupported or Incomplete.
    """
    if pinned := [path for path, file in save.files.by_path.items() if file.is_pinned]:
        return f"{pinned[0]} is only in a pin"
    demands = registry.demands(save.files, save.files.by_path, count_ranks(save, spool))
    sizes = save.files.sizes()
    for path, size in {**demands.model, **demands.resume}.items():
        if path not in sizes:
            return f"{path} is missing"
        if size not in (None, sizes[path]):
            return f"{path} has {sizes[path]} bytes, not {size}"
    return ""


def list_newer(
    checkpoints: Iterable[LocalCheckpoint], choice: Candidate | None
) -> tuple[LocalCheckpoint, ...]:
    """Return the checkpoints that a training which begins with ``choice`` must not find.

    They are those of a greater step in the same series of names, and torn ones.  If ``choice`` is
    None, the training begins from the beginning, and all are returned.
    """
    series, step = series_and_step(choice.checkpoint) if choice else ("", None)
    newer = []
    for checkpoint in checkpoints:
        own_series, own_step = series_and_step(checkpoint.save.checkpoint)
        is_newer = choice is None or (
            own_series == series and own_step is not None and step is not None and own_step > step
        )
        is_chosen = choice is not None and checkpoint.save.checkpoint == choice.checkpoint
        if is_newer or (checkpoint.torn and not is_chosen):
            newer.append(checkpoint)
    return tuple(newer)


def move_aside(output_dir: Path, paths: Sequence[Path]) -> list[Path]:
    """Rename checkpoints into `ASIDE`, sync the directories, and return the new paths.

    `ASIDE` is made if it is missing; a name that is taken there gets a number.  A path that does
    not exist any more is left out.  Raises StoreError.
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
            sync_path(folder)
    return moved


def put_in_place(staged: Path, final: Path) -> None:
    """Rename a downloaded checkpoint to its place; nothing if ``staged`` does not exist any more.

    Then another node, which shares the directory, has renamed it.  Raises StoreError.
    """
    with _reported(final):
        with contextlib.suppress(FileNotFoundError):
            staged.rename(final)
        sync_path(final.parent)


def inode(path: Path | None) -> tuple[int, int] | None:
    """Return the device and inode at a path, following no link; None if nothing is there."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = path.lstat()
            return info.st_dev, info.st_ino
    return None


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold an exclusive lock on an output directory, which nodes may share, within the block.

    Waits for the lock without a limit.  On a file system without locks the block runs without one.
    Raises StoreError if the directory cannot be opened.
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
    """Return the directory for a download whose place another save has."""
    return output_dir / STAGING / save_id


def remove_staging(output_dir: Path) -> None:
    """Remove downloads that were not put in their places; the store has all of them."""
    shutil.rmtree(output_dir / STAGING, ignore_errors=True)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Within the block, raise an OSError as StoreError with the path that it is about."""
    try:
        yield
    except CkptsyncError:
        raise
    except OSError as e:
        raise StoreError(
            f"{e.filename or path}: {(e.strerror or str(e)).lower()}",
            hint="check free space and permissions of the output directory",
        ) from e
