"""`ckptsync.mark_saved`: one line of any training script, where no callback of ours sees the saves.

It needs the standard library, and torch only where the script has it.  It makes a few system calls on the trainer's own disk.

A rank marks its part, and then looks whether all ranks that write into the same directory have marked theirs: the last of them makes
the pin.  Which ranks those are is known when all have left a word in torch's rendezvous, each at its first save
(`ckptsync.hooks.ranks`).  Until then nobody pins: on several nodes the worker judges the first save by its marks and files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.hooks import ending, model_facts, ranks
from ckptsync.hooks.pinning import Say, Source
from ckptsync.hooks.ranks import Rank, Words, this_rank
from ckptsync.hooks.saves import HookLog, RankSaves
from ckptsync.scan import FINAL, Spot, family_of, homes, name_at
from ckptsync.spool import pins
from ckptsync.spool.marks import RankMark
from ckptsync.walk import OURS, walk

Part = Literal["mine", "all"]
Exchange = Callable[[str, int], Words]
"""Leaves a word for the ranks whose spools lie so many levels above their checkpoints."""
_ONE_FOR_ALL = 'call it on every rank, or on one that knows that all are done, with part="all"'
_LEVELS = (1, 2, 4)  # of `ckptsync.scan.homes`, for a checkpoint that is no final model
_TRAINERS = ("lightning", "pytorch_lightning", "deepspeed", "accelerate", "torchtitan", "torch")
_lock = threading.Lock()
_markers: dict[tuple[int, Path], Marker] = {}
_exchanges: Counter[str] = Counter()  # ranks that save into several directories of one name begin with them in the same order
_log = HookLog()


def mark_saved(path: str | os.PathLike[str], *, part: Part = "mine", strict: bool = False) -> bool:
    """Do what `ckptsync.mark_saved` says."""
    try:
        with _lock:
            return _mark(os.fspath(path), part)
    except Exception as e:  # training comes first: the error is logged, and the worker judges the files
        if strict:
            raise _as_ckptsync_error(path, e) from e
        hint = getattr(e, "hint", "")
        _log.write(f"could not mark {path}: {type(e).__name__}: {e}{f'; {hint}' if hint else ''}")
        return False


def _mark(given: str, part: Part) -> bool:
    if part not in ("mine", "all"):
        raise ConfigError(f"part: {part!r}", hint='"mine" if this rank has written its part, "all" if every rank has')
    if "://" in given:
        raise ConfigError(f"{given}: not a path of this machine", hint="what is written straight into a store needs no worker")
    path, rank = Path(given).absolute(), this_rank()
    shares = part == "mine" and rank.world > 1
    if shares and not rank.can_meet:
        raise ConfigError(f"rank {rank.rank} of {rank.world}: torch has no process group to ask the others in", hint=_ONE_FOR_ALL)
    found = find_home(path)
    marker = _marker(path if found and found[1].family == FINAL else path.parent, rank)
    if found is None:
        return _mark_nothing(path, marker, shares=shares)
    home, spot = found
    if shares and spot.family == FINAL:
        raise ConfigError(f"{path}: a final model is whole when all ranks are done", hint=_ONE_FOR_ALL)
    if spot.only and spot.family == "lightning":
        _check_zip_end(path)
    is_pinned = (marker.mark_mine if part == "mine" else marker.mark_all)(home, spot)
    if marker.unmatched > 1:
        marker.log(f"{path}: other ranks have never said that they saved beside it; {_ONE_FOR_ALL}")
    return is_pinned


def _mark_nothing(path: Path, marker: Marker, *, shares: bool) -> bool:
    """Tell the other ranks that this one has written nothing, so that they need not wait for it."""
    if shares:
        marker.mark_nothing(path)
    if path.is_file() or walk(path).files:
        raise ConfigError(
            f"{path}: no checkpoint that a worker would find",
            hint="call it checkpoint-N, a file NAME.ckpt, or step-N with a distributed checkpoint or safetensors in it: `ckptsync help trainers`",
        )
    if not shares:
        raise Incomplete(f"{path}: nothing is there", hint="mark it when it is written")
    return False


def _check_zip_end(file: Path) -> None:
    """Raise Incomplete if Lightning still writes its file, in a thread (``AsyncCheckpointIO``): a zip's directory is its end."""
    with file.open("rb") as opened:
        begins, size = opened.read(2), opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 22))
        is_ended = size >= 22 and (begins != b"PK" or opened.read(4) == b"PK\x05\x06")
    if not is_ended:
        raise Incomplete(
            f"{file}: it is still being written", hint="mark it when it is saved; with AsyncCheckpointIO leave it to the worker"
        )


def find_home(path: Path) -> tuple[Path, Spot] | None:
    """Return the output directory of a checkpoint, and what a worker calls it; ``None`` if no worker would find it.

    Of several (``checkpoints/checkpoint_3``) it is the one that has a spool, since a worker looks there; else the
    uppermost from which links can be made.
    """
    found = list(homes(path)) or list(homes(path.resolve()))
    of_steps = [each for each in found if each[1].family != FINAL] or found
    with_spool = next((each for each in of_steps if (each[0] / OURS).is_dir()), None)
    linkable = (each for each in reversed(of_steps) if _is_linkable(each[0], path))
    return with_spool or next(linkable, of_steps[0] if of_steps else None)


def _is_linkable(home: Path, path: Path) -> bool:
    """Return whether links in ``home`` to files at ``path`` are possible.  A container's user may write to ``/``, but nobody trains there."""
    return home != home.parent and os.access(home, os.W_OK) and home.stat().st_dev == path.stat().st_dev


def _marker(folder: Path, rank: Rank) -> Marker:
    key = (os.getpid(), folder)
    if key not in _markers:
        token = secrets.token_hex(8)
        train = token if rank.world == 1 else _agreed_name(token) if rank.can_meet else ""
        if not any(pid == os.getpid() for pid, _ in _markers):
            ending.at_end(partial(_leave, os.getpid()))
        _markers[key] = Marker(rank, train, _exchange(rank, folder.name))
    return _markers[key]


def _agreed_name(token: str) -> str:
    """Return the training's name, the same on every rank; empty where the process group has no store: then files' times decide."""
    try:
        return ranks.first_word(token)
    except Exception:  # noqa: BLE001  # whatever torch's backends raise; part="all" works without it
        return ""


def _exchange(rank: Rank, name: str) -> Exchange:
    """Let ranks meet that call a directory by one name; where they do not, or several in another order, files decide."""

    @cache
    def number() -> int:
        _exchanges[name] += 1
        return _exchanges[name]

    return lambda word, level: ranks.exchange(rank.rank, rank.world, word, f"marked-{number()}-{level}-{quote(name)}")


def _leave(pid: int) -> None:
    """Leave when the script is over; not in a process that it forked."""
    for (owner, _), marker in _markers.items():
        if owner == pid == os.getpid():
            with contextlib.suppress(OSError, CkptsyncError):  # the worker sees that the process has gone
                marker.leave(has_failed=ending.has_failed())


def _as_ckptsync_error(path: object, error: Exception) -> CkptsyncError:
    if isinstance(error, CkptsyncError):
        return error
    if isinstance(error, OSError):
        return StoreError(f"{path}: {error.strerror or error}", hint="look at the disk that the trainer writes to")
    return CkptsyncError(f"{path}: could not be marked: {type(error).__name__}: {error}")


class Marker:
    """One rank's saves in the directory in which it saves.  ``train`` names the training; empty where ranks could not agree on a name.

    ``say`` is where errors of threads go (default: the hook's log).  Methods may raise OSError or one of ckptsync's errors.
    """

    def __init__(self, rank: Rank, train: str, exchange: Exchange, say: Say | None = None) -> None:
        self._rank, self._train, self._exchange = rank, train, exchange
        self._say = say or self.log
        self._process = secrets.token_hex(8)
        self._saves: RankSaves | None = None
        self._counts: Counter[str] = Counter()
        self._words: tuple[str, ...] | None = None
        self._pending_words: dict[int, Words] = {}
        self._unmatched: list[RankMark] = []

    @property
    def unmatched(self) -> int:
        """How many saves this rank marked while another had not left its word."""
        return len(self._unmatched)

    def log(self, text: str) -> None:
        """Log in the spool, if it is known, and in the trainer's log."""
        _log.write(text, self._saves.spool if self._saves else None, self._rank.rank)

    def mark_mine(self, home: Path, spot: Spot) -> bool:
        """Mark this rank's part as written; return whether this call pinned the whole save."""
        saves = self._enter(home)
        mark = saves.mark(self._next_id(spot.name), spot.name, spot.step or 0)
        # whoever has all words, after its own mark, sees all marks of earlier ranks
        if self._words is None and not self._has_met(_level(home, spot)):
            self._unmatched.append(mark)
            return False
        assert self._words is not None
        writers = ranks.neighbours(saves.spool, saves.begun, self._words)
        self._note_writers(saves, mark, len(writers))
        return saves.is_last(mark, writers) and self._pin(saves, spot, mark.save, writers)

    def mark_nothing(self, path: Path) -> None:
        """State that this rank has no part in a save, or runs ahead of one that has, so that nobody waits for it."""
        saves = self._saves
        if saves and path.is_relative_to(saves.output_dir):
            name = name_at(saves.output_dir, path)
            saves.mark(self._next_id(name), name, Spot(name, family_of(name), path).step or 0)
        self.leave_word(*_LEVELS)

    def mark_all(self, home: Path, spot: Spot) -> bool:
        """Pin a save for all ranks: every part in this directory is written."""
        saves = self._enter(home)
        save = self._next_id(spot.name) if self._train else ""
        return self._pin(saves, spot, save, (self._rank.rank,))

    def leave(self, *, has_failed: bool) -> None:
        """State that this process writes nothing more; after an error, not that its training has ended."""
        if self._saves:
            now = time.time()
            self._saves.update(ended=0.0 if has_failed else now, left=now)

    def leave_word(self, *levels: int) -> None:
        """Leave this rank's word at these levels, once."""
        for level in levels:
            if level not in self._pending_words:
                self._pending_words[level] = self._exchange(f"{self._process} {socket.gethostname()}", level)

    def _enter(self, home: Path) -> RankSaves:
        """Introduce this rank in an output directory; again if it is another one, such as that of a worker that was started later."""
        if self._saves is None or self._saves.output_dir != home:
            begun = ranks.introduce(
                home,
                self._rank.rank,
                self._rank.world,
                trainer=_trainer(),
                facts=model_facts.about_process(),
                process=self._process,
                marked="some",
            )
            self._saves = RankSaves(home, begun)
            self._saves.update(train=self._train)
            self._words = None
            self._unmatched.clear()
        return self._saves

    def _has_met(self, level: int) -> bool:
        self.leave_word(level)
        self._words = self._pending_words[level]()
        return self._words is not None

    def _next_id(self, checkpoint: str) -> str:
        assert self._saves is not None
        self._counts[checkpoint] += 1
        return self._saves.save_id(checkpoint, self._counts[checkpoint] - 1)

    def _note_writers(self, saves: RankSaves, mark: RankMark, local_world: int) -> None:
        """Write into this mark and those before it how many ranks write here: the worker then knows which saves are whole."""
        if mark.local_world != local_world:
            for each in (*self._unmatched, mark):
                saves.rewrite_mark(replace(each, local_world=local_world))
            saves.update(local_world=local_world)
        self._unmatched.clear()

    def _pin(self, saves: RankSaves, spot: Spot, save: str, writers: tuple[int, ...]) -> bool:
        files = {s.path: (s.size, s.mtime) for s in walk(spot.path, spot.only).files}
        pinned = pins.pins(saves.output_dir, lambda name: name == spot.name)
        if any(p.commit and p.commit.files == files for p in pinned):
            return True  # another call pinned it before
        source = Source(spot.name, spot.path, lambda path: walk(path, spot.only))
        saves.pin(source, save, spot.step or 0, writers, self._say)
        return bool(files)


def _level(home: Path, spot: Spot) -> int:
    at = spot.path / spot.only[0] if spot.only else spot.path
    return len(at.relative_to(home).parts)


def _trainer() -> str:
    return next((f"{name} {model_facts.version_of(name)}".strip() for name in _TRAINERS if name in sys.modules), "")
