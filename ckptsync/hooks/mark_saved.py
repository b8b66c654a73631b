"""`ckptsync.mark_saved`: one line of any training script, where no callback of ours sees the saves.

It needs the standard library, and torch only where the script has it.  It makes a few system calls
on the trainer's own disk.

No rank knows when the others have written their parts, and none may wait.  So a rank marks its own
part, and then checks whether all ranks that write into the same directory have marked theirs: the
last of them makes the pin.  The ranks learn who they are from values in torch's rendezvous, which
each sets at its first save.  Until all are there nobody pins: on several nodes the worker judges
the first save by its files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ckptsync.checkpoint_dirs import (
    FINAL,
    CheckpointDir,
    checkpoint_name,
    family_of,
    output_dirs_of,
)
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.hooks import added_files, process_group
from ckptsync.hooks.process_group import Rank, Words, this_rank
from ckptsync.hooks.rank_markers import HookLog, RankSaves, has_failed, run_at_exit
from ckptsync.walk import SPOOL, walk

MarkedPart = Literal["mine", "all"]
Exchange = Callable[[str], Words]
"""Leaves a word for the ranks that save into a directory of the same name."""
_ONE_FOR_ALL = (
    'call mark_saved on every rank, or with part="all" on one rank after all ranks have saved'
)
_TRAINERS = ("lightning", "pytorch_lightning", "deepspeed", "accelerate", "torchtitan", "torch")
_lock = threading.Lock()
_markers: dict[tuple[int, Path], Marker] = {}
# ranks that save into several directories of one name begin with them in the same order
_exchanges: Counter[str] = Counter()
_log = HookLog()


def mark_saved(
    path: str | os.PathLike[str], *, part: MarkedPart = "mine", strict: bool = False
) -> bool:
    """Mark a save as written; return whether this call pinned all of it.

    See `ckptsync.mark_saved`.  With ``strict`` raises ckptsync's errors; else logs them and returns
    False.
    """
    try:
        with _lock:
            return _mark(os.fspath(path), part)
    except Exception as e:  # training comes first; the worker judges the files
        if strict:
            raise _as_ckptsync_error(path, e) from e
        hint = getattr(e, "hint", "")
        _log(f"could not mark {path}: {type(e).__name__}: {e}{f'; {hint}' if hint else ''}")
        return False


def _mark(path_given: str, part: MarkedPart) -> bool:
    """Mark a save; return whether this call pinned all of it.

    Raises ConfigError for wrong arguments or a path that is no checkpoint, Incomplete for a missing
    path, and what `Marker` raises.
    """
    if part not in ("mine", "all"):
        raise ConfigError(
            f"part: {part!r}",
            hint='"mine" if this rank has written its part, "all" if every rank has',
        )
    if "://" in path_given:
        raise ConfigError(
            f"{path_given}: not a path of this machine",
            hint=(
                "mark_saved takes a local path; files that you write directly to a store need no"
                " worker"
            ),
        )
    path, rank = Path(path_given).absolute(), this_rank()
    shares = part == "mine" and rank.world > 1
    if shares and not rank.can_meet:
        raise ConfigError(
            f"rank {rank.rank} of {rank.world}: mark_saved needs a torch process group to reach"
            " the other ranks",
            hint=_ONE_FOR_ALL,
        )
    home_and_dir = find_home(path)
    is_final = home_and_dir is not None and home_and_dir[1].family == FINAL
    if shares and is_final:
        raise ConfigError(
            f"{path}: a final model is complete only after all ranks have saved", hint=_ONE_FOR_ALL
        )
    marker = _get_marker(path if is_final else path.parent, rank)
    if home_and_dir is None:
        return _mark_nothing(path, marker, shares=shares)
    is_pinned = (
        marker.mark_mine(*home_and_dir) if part == "mine" else marker.mark_all(*home_and_dir)
    )
    if marker.unmatched > 1:
        marker.log(
            f"{path}: the other ranks have not called mark_saved for this save; {_ONE_FOR_ALL}"
        )
    return is_pinned


def _mark_nothing(path: Path, marker: Marker, *, shares: bool) -> bool:
    """State to the other ranks that this one has written nothing; return False.

    Raises ConfigError for a path with files that is no checkpoint, Incomplete for a missing path
    that no other rank shares.
    """
    if shares:
        marker.mark_nothing(path)
    if path.is_file() or walk(path).files:
        raise ConfigError(
            f"{path}: the worker does not recognize this path as a checkpoint",
            hint=(
                "name it checkpoint-N, NAME.ckpt (one file), or step-N with a distributed"
                " checkpoint or safetensors in it: see `ckptsync help trainers`"
            ),
        )
    if not shares:
        raise Incomplete(f"{path}: not found", hint="call mark_saved after the save")
    return False


def find_home(path: Path) -> tuple[Path, CheckpointDir] | None:
    """Return the output directory of a checkpoint, and what a worker calls it.

    None if none finds it.  Of several output directories (``checkpoints/checkpoint_3``) it is the
    one that has a spool, since a worker uses it; else the uppermost from which links can be made;
    else the nearest.  One that finds a final model is only taken if no other finds a checkpoint.
    """
    homes = list(output_dirs_of(path)) or list(output_dirs_of(path.resolve()))
    of_steps = [home for home in homes if home[1].family != FINAL] or homes
    with_spool = next((home for home in of_steps if (home[0] / SPOOL).is_dir()), None)
    linkable = (home for home in reversed(of_steps) if _is_linkable(home[0], path))
    return with_spool or next(linkable, of_steps[0] if of_steps else None)


def _is_linkable(home: Path, path: Path) -> bool:
    """Return whether files at ``path`` can be linked into ``home``, which is not ``/``."""
    return (
        home != home.parent
        and os.access(home, os.W_OK)
        and home.stat().st_dev == path.stat().st_dev
    )


def _get_marker(folder: Path, rank: Rank) -> Marker:
    """Return this process's marker of a directory.

    The first call makes it, and registers `_leave` for the end of the process.  The training's
    name is random for a rank alone, else the first rank's by torch's store, else empty.
    """
    key = (os.getpid(), folder)
    if key not in _markers:
        train = secrets.token_hex(8) if rank.world == 1 else ""
        if rank.can_meet and rank.world > 1:
            # whatever torch's backends raise: a process group may have no store, and then files'
            # times decide
            with contextlib.suppress(Exception):
                train = process_group.first_word(secrets.token_hex(8))
        if not any(pid == os.getpid() for pid, _ in _markers):
            run_at_exit(partial(_leave, os.getpid()))
        about = cache(partial(_next_exchange_key, folder.name))
        _markers[key] = Marker(
            rank,
            train,
            lambda word: process_group.exchange(rank.rank, rank.world, word, about()),
        )
    return _markers[key]


def _next_exchange_key(name: str) -> str:
    """Return the rendezvous key for this process's next directory of this name.

    It is the same on all ranks if they save into directories of one name in the same order;
    otherwise files decide.
    """
    _exchanges[name] += 1
    return f"marked-{_exchanges[name]}-{quote(name)}"


def _leave(pid: int) -> None:
    """State that process ``pid`` writes nothing more; do nothing in a process that it forked."""
    for (owner, _), marker in _markers.items():
        if owner == pid == os.getpid():
            # the worker sees that the process has gone
            with contextlib.suppress(OSError, CkptsyncError):
                marker.leave(has_failed=has_failed())


def _as_ckptsync_error(path: object, error: Exception) -> CkptsyncError:
    """Return an error of ckptsync as it is, an OSError as StoreError, others as CkptsyncError."""
    if isinstance(error, CkptsyncError):
        return error
    if isinstance(error, OSError):
        return StoreError(
            f"{path}: {error.strerror or error}", hint="look at the disk that the trainer writes to"
        )
    return CkptsyncError(f"{path}: could not be marked: {type(error).__name__}: {error}")


class Marker:
    """Marks one rank's saves in the directory in which it saves.

    ``train``: the training's name; empty where ranks could not agree on one.  Ranks exchange
    ``<process> <level>``: how many directories the spool lies above the checkpoints.  Ranks of
    different levels see different output directories, so nothing is pinned.  Methods may raise
    OSError or one of ckptsync's errors.
    """

    def __init__(self, rank: Rank, train: str, exchange: Exchange) -> None:
        """Remember the arguments; write nothing until the first mark."""
        self._rank, self._train, self._exchange = rank, train, exchange
        self.log = HookLog(before=_log)
        self.log.rank = rank.rank
        self._process = secrets.token_hex(8)
        self._saves: RankSaves | None = None
        self._counts: Counter[str] = Counter()
        self._words: Words | None = None
        self._level = ""
        self._processes: tuple[str, ...] | None = None
        self.unmatched = 0  # saves in a row that this rank marked while another had left no word

    def mark_mine(self, home: Path, checkpoint_dir: CheckpointDir) -> bool:
        """Mark this rank's part as written; return whether this call pinned the whole save.

        Sets this rank's value in the rendezvous, and how many ranks write here in its introduction.
        Returns False without pinning while other ranks' values are missing (counted in
        ``unmatched``), or if another rank marks later.
        """
        saves = self._enter(home)
        location = checkpoint_dir.path.joinpath(*(checkpoint_dir.only or ())[:1])
        self._set_word(str(len(location.relative_to(home).parts)))
        name, step = checkpoint_dir.name, checkpoint_dir.step or 0
        save = self._next_id(name)
        saves.mark(name, save, step)
        # whoever has all words, after its own mark, sees all marks of earlier ranks
        processes = self._meet()
        if processes is None:
            self.unmatched += 1
            return False
        self.unmatched = 0
        writers = saves.writers(processes)
        if len(writers) != saves.begun.local_world:
            saves.update(local_world=len(writers))
            saves.mark(name, save, step)  # the worker then knows when the save is whole
        is_claimed = bool(writers) and saves.claim_pinning(name, save, writers)
        return is_claimed and self._pin(checkpoint_dir, save, writers)

    def mark_nothing(self, path: Path) -> None:
        """Mark that this rank has no part in a save, so that nobody waits for it.

        Nothing is marked before the first save, or for a ``path`` outside its output directory.
        This rank's value in the rendezvous is set always.
        """
        saves = self._saves
        if saves and path.is_relative_to(saves.output_dir):
            name = checkpoint_name(saves.output_dir, path)
            step = CheckpointDir(name, family_of(name), path).step or 0
            saves.mark(name, self._next_id(name), step)
        self._set_word(self._level)

    def mark_all(self, home: Path, checkpoint_dir: CheckpointDir) -> bool:
        """Pin a save for all ranks: every part in this directory is written; return as `_pin`."""
        self._enter(home)
        save = self._next_id(checkpoint_dir.name)
        return self._pin(checkpoint_dir, save, (self._rank.rank,))

    def leave(self, *, has_failed: bool) -> None:
        """After a first save, note that this process has left, and that it ended unless failed."""
        if self._saves:
            now = time.time()
            self._saves.update(ended=0.0 if has_failed else now, left=now)

    def _enter(self, home: Path) -> RankSaves:
        """Introduce the rank in an output directory, unless it is there; return its saves.

        An earlier directory's saves are forgotten, and the log goes to the new spool.
        """
        if self._saves is None or self._saves.output_dir != home:
            trainer = next((name for name in _TRAINERS if name in sys.modules), "")
            self._saves = RankSaves(
                home,
                self._rank.rank,
                self._rank.world,
                trainer=f"{trainer} {added_files.version_of(trainer)}".strip() if trainer else "",
                facts=added_files.describe_process(),
                log=self.log,
                process=self._process,
                marks="some",
            )
            self._saves.update(train=self._train)
            self.log.spool = self._saves.spool
        return self._saves

    def _set_word(self, level: str) -> None:
        """Set this rank's value in the rendezvous, unless it is set with this level.

        A new value makes the process ids of `_meet` unknown again.
        """
        if self._words is None or level != self._level:
            self._words = self._exchange(f"{self._process} {level}")
            self._level, self._processes = level, None

    def _meet(self) -> tuple[str, ...] | None:
        """Return all ranks' process ids, and remember them.

        None while one is missing, or if one uses another output directory.
        """
        words = self._words() if self._words and self._processes is None else None
        if words is not None:
            processes, levels = zip(*(word.split(" ", 1) for word in words), strict=True)
            self._processes = tuple(processes) if {*levels} <= {self._level, ""} else None
        return self._processes

    def _next_id(self, checkpoint: str) -> str:
        """Count a save of this name; return its id, which is empty without a training's name."""
        assert self._saves is not None
        self._counts[checkpoint] += 1  # in all homes
        return self._saves.save_id(checkpoint, self._counts[checkpoint] - 1)

    def _pin(self, checkpoint_dir: CheckpointDir, save: str, writers: tuple[int, ...]) -> bool:
        """Pin a save; return whether it has files and is pinned, by this call or an earlier one.

        True also while a thread still copies its files, where there are no links.  Raises as
        `pin_checkpoint`.
        """
        assert self._saves is not None
        listing = walk(checkpoint_dir.path, checkpoint_dir.only)
        if self._saves.is_pinned(checkpoint_dir.name, listing):
            return True  # another call pinned it before
        self._saves.pin(
            checkpoint_dir.path,
            checkpoint_dir.name,
            save,
            checkpoint_dir.step or 0,
            writers,
            list_files=lambda path: walk(path, checkpoint_dir.only),
        )
        return bool(listing.files)
