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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.hooks import added, parts
from ckptsync.hooks import here as whereabouts
from ckptsync.hooks.here import Here
from ckptsync.hooks.pinning import Say, Source, pin
from ckptsync.scan import Spot, family_of, name_at
from ckptsync.spool import marks, pins
from ckptsync.spool.marks import Begun, RankMark
from ckptsync.walk import walk

Meet = Callable[[str], Callable[[], tuple[str, ...] | None]]
"""Leave a word; what is returned gives the words of all ranks, or ``None`` while one has not spoken."""
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
    """As torch's process group says, else as whatever started this process has it.  Raises ValueError where that is no number."""
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), is_met=True)
    for rank, world in _STARTERS:
        if world in environment:
            return Rank(int(environment.get(rank, "0")), int(environment[world]), is_met=False)
    return Rank(0, 1, is_met=False)


class Seat:
    """``train``: the same on every rank, empty where none could be agreed on.  Every method may raise OSError or one of ckptsync's errors."""

    def __init__(self, rank: Rank, train: str, meet: Meet) -> None:
        self._rank, self._train, self._meet = rank, train, meet
        self._process = secrets.token_hex(8)
        self._here: Here | None = None
        self._begun: Begun | None = None
        self._words: tuple[str, ...] | None = None
        self._ask: Callable[[], tuple[str, ...] | None] | None = None
        self._saved: Counter[str] = Counter()
        self._early: list[RankMark] = []

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

    def speak(self) -> None:
        """Leave the word of this rank, if it has not; hear the others, if all have spoken."""
        if self._ask is None:
            self._ask = self._meet(f"{self._process} {socket.gethostname()}")
        self._words = self._words or self._ask()

    def save_mine(self, home: Path, spot: Spot, say: Say) -> bool:
        """Mark the part of this rank as written; whether all of it is, and was pinned now."""
        here, begun = self._sit(home)
        mark = parts.mark(here.spool, begun, self._next(spot.name), spot.name, spot.step or 0)
        if not self._words:
            self._early.append(mark)
            self.speak()  # after the mark: who hears all words sees all marks
        if not self._words:
            return False
        ranks = whereabouts.neighbours(here.spool, begun, self._words)
        mark = self._counted(here, mark, len(ranks))
        return parts.is_last(here.spool, mark, ranks) and self._pinned(here, spot, mark.save, ranks, say)

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
        if self._here and self._begun:
            now = time.time()
            self._rewrite(self._here, replace(self._begun, ended=0.0 if has_failed else now, left=now))

    def _sit(self, home: Path) -> tuple[Here, Begun]:
        if self._here is None or self._begun is None or self._here.output_dir != home:
            self._here = Here(home, self._rank.rank, self._rank.world, has_state=False, only_model=False, trainer=_trainer())
            begun = whereabouts.introduce(self._here, added.about_process(), self._process, "some")
            self._rewrite(self._here, replace(begun, train=self._train))
        assert self._begun is not None
        return self._here, self._begun

    def _next(self, checkpoint: str) -> str:
        n = self._saved[checkpoint]
        self._saved[checkpoint] += 1
        return marks.save_id(self._train, checkpoint, n)

    def _counted(self, here: Here, mark: RankMark, local_world: int) -> RankMark:
        """The mark, and those before it, with the number of ranks that write here: it is known now."""
        for early in self._early:
            parts.write(here.spool, replace(early, local_world=local_world))
        self._early.clear()
        if self._begun and self._begun.local_world != local_world:
            self._rewrite(here, replace(self._begun, local_world=local_world))
            mark = replace(mark, local_world=local_world)
            parts.write(here.spool, mark)
        return mark

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


def _trainer() -> str:
    return next((f"{name} {added.version_of(name)}".strip() for name in _TRAINERS if name in sys.modules), "")
