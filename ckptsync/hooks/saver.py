"""A rank's part in each save: remember it, mark it done at the next event, and pin it if this rank is the last one here.

``on_save`` is too early: other ranks still write, and other callbacks may write again.  The next event of this rank comes after all
of its own writing, and before it takes part in the next gradient, without which nobody saves again or rotates.  So a pin that is
made by the last rank to mark a save, in that event, holds all files, whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.hooks import here as whereabouts
from ckptsync.hooks import parts
from ckptsync.hooks.agreed import agree
from ckptsync.hooks.here import Here
from ckptsync.hooks.pinning import Say, Source, pin
from ckptsync.hooks.trials import named, place
from ckptsync.hooks.unheard import Unheard
from ckptsync.spool import folders, marks
from ckptsync.spool.marks import Begun, RankMark
from ckptsync.walk import walk

_TIDY_EVERY = 64  # saves
Meeting = Callable[[int, int, str], Callable[[], tuple[str, ...] | None]]
"""Where ranks leave their words for each other: `ckptsync.hooks.agreed.agree`."""


@dataclass(frozen=True, slots=True)
class Save:
    """``n`` counts the saves of this name in this training."""

    checkpoint: str
    step: int
    n: int


class Saver:
    """One rank of one training.  Every method may raise OSError, one of ckptsync's errors or one of torch's; none waits for a rank."""

    def __init__(self, here: Here, facts: Mapping[str, str], say: Say, meet: Meeting = agree) -> None:
        self.here = here
        self.begun: Begun = whereabouts.introduce(here, facts)
        self._say = say
        self.trial = ""
        self._unheard = Unheard(here)
        self._pending: list[Save] = []
        self._saved: Counter[str] = Counter()
        self._commits = 0
        self._neighbours: tuple[int, ...] = ()
        try:
            self._agreed = meet(here.rank, here.world, f"{self.begun.process} {self.begun.host}")
        except Exception:
            self.withdraw()
            raise

    @property
    def added(self) -> Path:
        """Where rank 0 leaves what a sharded checkpoint lacks: its process names the training."""
        return self.here.spool / "added" / (self.begun.train or self.begun.process)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that write here; False until they know of each other."""
        return self._neighbours[:1] == (self.here.rank,)

    @property
    def last(self) -> str:
        """What this rank writes last into a checkpoint."""
        return self._unheard.last

    def follow(self, trial: str) -> None:
        """The training is a trial of a search, and saves into this directory below the output directory."""
        self.trial = trial
        self._unheard.follow(self.here.output_dir / trial)

    def remember(self, step: int) -> None:
        """``on_save``: it is committed at the next event."""
        self._unheard.hear(f"checkpoint-{step}")
        self._pend(step)

    def listen(self, step: int) -> None:
        """While training is being stopped: has this rank saved without an ``on_save``?"""
        if self._unheard.since(f"checkpoint-{step}"):
            self._pend(step)

    def commit(self, step: int | None) -> None:
        """The next event, still at ``step`` and before this rank's next gradients are out; ``None``: training has ended."""
        if not self._knows() or not self._pending:
            return
        while self._pending:
            save = self._pending[0]
            mark = self._mark(save)
            del self._pending[0]
            if step in (None, save.step) and self._is_last(mark):
                self._pin(save, mark)

    def late(self) -> None:
        """Rotation may have begun: what is still pending is marked, since this rank has written it; nobody pins it."""
        if not self._pending:
            return
        late, self._pending = self._pending, []
        for save in late:
            self._say(f"{save.checkpoint}: could not be pinned in time; the worker judges it by its files")
        if not self._knows():
            self.withdraw()
            return
        for save in late:
            self._mark(save)

    def end(self) -> None:
        """``on_train_end``: the final model may still be written."""
        for checkpoint in self._unheard.all_since():
            self._pend(int(checkpoint.rpartition("-")[2]))
        self.commit(None)
        self._rewrite(replace(self.begun, ended=time.time()))

    def leave(self) -> None:
        """Nothing more will be written by this process."""
        self._rewrite(replace(self.begun, left=time.time()))

    def withdraw(self) -> None:
        """Take back that this rank will mark its saves: then files decide."""
        folders.unlink(marks.begun_path(self.here.spool, self.begun.process))

    def pin_alone(self, source: Source, step: int) -> None:
        """Pin what only this process writes, at its end."""
        save_id = marks.save_id(self.begun.train, source.checkpoint, self._saved[source.checkpoint])
        commit = parts.commit(self.begun, save_id, source.checkpoint, step, (self.here.rank,))
        pin(self.here, source, commit, self._say)
        self._saved[source.checkpoint] += 1

    def _pend(self, step: int) -> None:
        checkpoint = named(self.trial, f"checkpoint-{step}")
        if any(save.checkpoint == checkpoint for save in self._pending):
            return  # a just-in-time save over one that is not pinned yet: one save, as far as anybody will see
        self._pending.append(Save(checkpoint, step, self._saved[checkpoint]))
        self._saved[checkpoint] += 1

    def _knows(self) -> bool:
        """Whether all ranks have spoken; asks, and tells the worker, until they have."""
        if not self._neighbours:
            words = self._agreed()
            if words is None:
                return False
            self._neighbours = whereabouts.neighbours(self.here.spool, self.begun, words)
            self._rewrite(replace(self.begun, train=words[0].partition(" ")[0], local_world=len(self._neighbours)))
        return True

    def _mark(self, save: Save) -> RankMark:
        save_id = marks.save_id(self.begun.train, save.checkpoint, save.n)
        return parts.mark(self.here.spool, self.begun, save_id, save.checkpoint, save.step)

    def _is_last(self, mark: RankMark) -> bool:
        return parts.is_last(self.here.spool, mark, self._neighbours)

    def _pin(self, save: Save, mark: RankMark) -> None:
        commit = parts.commit(self.begun, mark.save, save.checkpoint, save.step, self._neighbours)
        source = Source(save.checkpoint, place(self.here.output_dir, save.checkpoint), walk, self.added)
        if not self.here.only_model and not source.path.is_dir():  # each rank leaves its random state there
            raise Incomplete(
                f"{save.checkpoint}: nothing of it in {self.here.output_dir}: this training saves elsewhere, or has removed it"
            )
        pin(self.here, source, commit, self._say)
        self._commits += 1
        if self._commits % _TIDY_EVERY == 0:
            whereabouts.forget_saves(self.here.spool)

    def _rewrite(self, begun: Begun) -> None:
        self.begun = begun
        marks.write_mark(marks.begun_path(self.here.spool, begun.process), begun)
