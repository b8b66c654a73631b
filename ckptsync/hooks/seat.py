"""One rank, where it saves: what `ckptsync.mark_saved` keeps between two calls.

A rank marks its part, and then looks whether all that write into the same directory have marked theirs: the last of those makes the pin.
Which ranks they are is known when all have left a word, each at its first save (`ckptsync.hooks.agreed`); until then nobody pins.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import ConfigError
from ckptsync.hooks import added, parts
from ckptsync.hooks import here as whereabouts
from ckptsync.hooks.here import Here
from ckptsync.hooks.pinning import Say, Source, pin
from ckptsync.hooks.staging import Staged, stage, sweep
from ckptsync.scan import Spot, family_of, name_at
from ckptsync.spool import marks, pins
from ckptsync.spool.marks import Begun, RankMark
from ckptsync.walk import walk

Meet = Callable[[str, int], Callable[[], tuple[str, ...] | None]]
"""Leave a word with those whose spools lie so many levels above their checkpoints; what is returned gives the words of all ranks, or
``None`` while one has not spoken."""
_LEVELS = (1, 2, 4)  # of `ckptsync.scan.homes`, for a checkpoint that is no final model
_STARTERS = (  # rank and number of processes, as torchrun, DeepSpeed and accelerate, Open MPI, other MPIs and srun say them
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_TIDY_EVERY = 64  # saves
_TRAINERS = ("lightning", "pytorch_lightning", "deepspeed", "accelerate", "torchtitan", "torch")


@dataclass(frozen=True, slots=True)
class Rank:
    """Which process of a training this is.  ``is_met``: torch's process group is there to ask the others."""

    rank: int
    world: int
    is_met: bool


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """As torch's process group says, else as whatever started this process has it.  Raises ConfigError where that is no number."""
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), is_met=True)
    for rank, world in _STARTERS:
        if world in environment:
            told = environment.get(rank, "0"), environment[world]
            if not all(map(str.isdecimal, told)):
                raise ConfigError(
                    f"{rank}={told[0]} {world}={told[1]}: two numbers expected", hint="whatever started this process set them"
                )
            return Rank(int(told[0]), int(told[1]), is_met=False)
    return Rank(0, 1, is_met=False)


class Seat:
    """``train``: the same on every rank, empty where none could be agreed on.  Every method may raise OSError or one of ckptsync's errors."""

    def __init__(self, rank: Rank, train: str, meet: Meet) -> None:
        self._rank, self._train, self._meet = rank, train, meet
        self._process = secrets.token_hex(8)
        self._here: Here | None = None
        self._begun: Begun | None = None
        self._words: tuple[str, ...] | None = None
        self._asked: dict[int, Callable[[], tuple[str, ...] | None]] = {}
        self._saved: Counter[str] = Counter()
        self._early: list[RankMark] = []
        self._staged: Staged | None = None

    @property
    def spool(self) -> Path | None:
        """Where marks lie, once it is known."""
        return self._here.spool if self._here else None

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self._rank.rank

    @property
    def waiting(self) -> int:
        """How many saves were marked here while some rank had not spoken."""
        return len(self._early)

    def speak(self, levels: Iterable[int] = _LEVELS) -> None:
        """Leave the word of this rank, if it has not."""
        for level in levels:
            if level not in self._asked:
                self._asked[level] = self._meet(f"{self._process} {socket.gethostname()}", level)

    def save_mine(self, home: Path, spot: Spot, say: Say) -> bool:
        """Mark the part of this rank as written; whether all of it is, and was pinned now."""
        here, begun = self._sit(home)
        mark = parts.mark(here.spool, begun, self._next(spot.name), spot.name, spot.step or 0)
        if not self._words and not self._has_heard(_level(home, spot)):
            self._wait(here, spot, mark)
            return False
        assert self._words is not None
        ranks = whereabouts.neighbours(here.spool, begun, self._words)
        self._count(here, mark, len(ranks))
        try:
            return parts.is_last(here.spool, mark, ranks) and self._pinned(here, spot, mark.save, ranks, say)
        finally:
            self._publish_first(here, ranks, say)

    def save_nothing(self, path: Path) -> None:
        """Say that this rank has no part in a save, or runs ahead of one that has: nobody need wait for it."""
        if self._here and self._begun and path.is_relative_to(self._here.output_dir):
            name = name_at(self._here.output_dir, path)
            parts.mark(self._here.spool, self._begun, self._next(name), name, Spot(name, family_of(name), path).step or 0)
        self.speak()

    def save_all(self, home: Path, spot: Spot, say: Say) -> bool:
        """Every rank's part in this directory is written: this one speaks for all."""
        here, _ = self._sit(home)
        save = self._next(spot.name) if self._train else ""
        return self._pinned(here, spot, save, (self._rank.rank,), say)

    def leave(self, *, has_failed: bool) -> None:
        """The script is over; after an error nobody says that its training has ended."""
        self._drop_staged()
        if self._here and self._begun:
            now = time.time()
            self._rewrite(self._here, replace(self._begun, ended=0.0 if has_failed else now, left=now))

    def _sit(self, home: Path) -> tuple[Here, Begun]:
        if self._here is None or self._begun is None or self._here.output_dir != home:
            self._here = Here(home, self._rank.rank, self._rank.world, has_state=False, only_model=False, trainer=_trainer())
            begun = whereabouts.introduce(self._here, added.about_process(), self._process, "some")
            self._rewrite(self._here, replace(begun, train=self._train))
            sweep(self._here.spool)
            self._forget()
        assert self._begun is not None
        return self._here, self._begun

    def _forget(self) -> None:
        """A spool of its own, such as that of a worker that was started later: who else marks there is to be heard anew."""
        self._drop_staged()
        self._words = None
        self._early.clear()

    def _has_heard(self, level: int) -> bool:
        """After the mark: who hears all words sees all marks."""
        self.speak((level,))
        self._words = self._asked[level]()
        return self._words is not None

    def _wait(self, here: Here, spot: Spot, mark: RankMark) -> None:
        """Some rank has not spoken.  One save is kept until it has; a second one says that it may never."""
        self._drop_staged()
        self._early.append(mark)
        if not self._early[1:]:
            self._staged = stage(here, spot, mark, self._process)

    def _drop_staged(self) -> None:
        if self._staged:
            self._staged.drop()
            self._staged = None

    def _next(self, checkpoint: str) -> str:
        n = self._saved[checkpoint]
        self._saved[checkpoint] += 1
        return marks.save_id(self._train, checkpoint, n)

    def _count(self, here: Here, mark: RankMark, local_world: int) -> None:
        """Say in the mark, and those before it, how many ranks write here: it is known now."""
        if self._begun and mark.local_world != local_world:
            for early in (*self._early, mark):
                parts.write(here.spool, replace(early, local_world=local_world))
            self._rewrite(here, replace(self._begun, local_world=local_world))
        self._early.clear()

    def _publish_first(self, here: Here, ranks: tuple[int, ...], say: Say) -> None:
        """What was kept of the first save becomes a pin, of one of the ranks that saw all of it."""
        first = self._staged
        if first and self._begun and first.is_whole(ranks) and parts.is_last(here.spool, first.mark, ranks):
            first.publish(here, parts.commit(self._begun, first.mark.save, first.mark.checkpoint, first.mark.step, ranks), say)
        self._drop_staged()

    def _pinned(self, here: Here, spot: Spot, save: str, ranks: tuple[int, ...], say: Say) -> bool:
        assert self._begun is not None
        files = {s.path: (s.size, s.mtime) for s in walk(spot.path, spot.only).files}
        if any(p.commit and p.commit.files == files for p in pins.pins(here.output_dir, lambda name: name == spot.name)):
            return True  # somebody said so before
        source = Source(spot.name, spot.path, lambda path: walk(path, spot.only))
        pin(here, source, parts.commit(self._begun, save, spot.name, spot.step or 0, ranks), say)
        if sum(self._saved.values()) % _TIDY_EVERY == 0:
            whereabouts.forget_saves(here.spool)
        return bool(files)

    def _rewrite(self, here: Here, begun: Begun) -> None:
        self._begun = begun
        marks.write_mark(marks.begun_path(here.spool, begun.process), begun)


def _level(home: Path, spot: Spot) -> int:
    at = spot.path / spot.only[0] if spot.only else spot.path
    return len(at.relative_to(home).parts)


def _trainer() -> str:
    return next((f"{name} {added.version_of(name)}".strip() for name in _TRAINERS if name in sys.modules), "")
