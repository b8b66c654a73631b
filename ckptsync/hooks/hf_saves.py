"""A rank's saves of Hugging Face's Trainer: remember each, mark it at the rank's next event, pin it if this rank is the last.

``on_save`` is too early: other ranks still write, and other callbacks may write again.  The next event of this rank comes after all
of its own writing, and before it takes part in the next gradient, without which no rank saves again or rotates.  So a pin
that the last rank makes in that event holds all files, whole.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.hooks import ranks
from ckptsync.hooks.pinning import SENTINEL, Say, Source
from ckptsync.hooks.ranks import Words
from ckptsync.hooks.saves import RankSaves
from ckptsync.parsing import parse
from ckptsync.spool.marks import RankMark
from ckptsync.walk import walk

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")  # what a store can keep before a checkpoint's name
Exchange = Callable[[int, int, str], Words]
Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """One rank of a Trainer.  ``has_state``: it writes ``trainer_state.json`` (rank 0, or the first of a node).

    ``only_model``: ranks write no states of their own.
    """

    output_dir: Path
    rank: int
    world: int
    has_state: bool
    only_model: bool
    trainer: str = ""

    @property
    def last_file(self) -> str:
        """What this rank writes last into a checkpoint."""
        if self.has_state or self.only_model:
            return "trainer_state.json"
        return "rng_state.pth" if self.world == 1 else f"rng_state_{self.rank}.pth"


@dataclass(frozen=True, slots=True)
class Save:
    """``n`` counts the saves of this name in this training, from 0."""

    checkpoint: str
    step: int
    n: int


class TrainerSaves:
    """One rank of one training.  Every method may raise OSError, one of ckptsync's errors or one of torch's; none waits for a rank."""

    def __init__(self, me: TrainerRank, facts: Mapping[str, str], say: Say, exchange: Exchange = ranks.exchange) -> None:
        self.me, self._say = me, say
        self.trial = ""
        self.saves = RankSaves(me.output_dir, ranks.introduce(me.output_dir, me.rank, me.world, trainer=me.trainer, facts=facts))
        self._uncalled = UncalledSaves(me)
        self._pending: list[Save] = []
        self._neighbours: tuple[int, ...] = ()
        try:
            self._words = exchange(me.rank, me.world, f"{self.saves.begun.process} {self.saves.begun.host}")
        except Exception:
            self.withdraw()
            raise

    @property
    def added(self) -> Path:
        """Where rank 0 writes the files that a sharded checkpoint lacks: its process names the training."""
        begun = self.saves.begun
        return self.saves.spool / "added" / (begun.train or begun.process)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that write here; False until they know of each other."""
        return self._neighbours[:1] == (self.me.rank,)

    def remember(self, state: Any) -> None:
        """Remember the save of an ``on_save`` at this state of the Trainer; it is committed at the next event."""
        step = state.global_step
        if state.is_hyper_param_search and not self.trial:
            self.trial = self._find_trial(state)
            self._uncalled.follow(self.me.output_dir / self.trial)
        self._uncalled.note(f"checkpoint-{step}")
        self._pend(step)

    def find_uncalled(self, step: int) -> None:
        """Remember a save of this step without an ``on_save``, while training is being stopped."""
        if self._uncalled.is_new(f"checkpoint-{step}"):
            self._pend(step)

    def commit(self, step: int | None) -> None:
        """Mark what is pending, and pin it if this rank is the last, at the next event.

        That is still at ``step``, before this rank's next gradients are out; ``None``: training has ended.
        """
        if not self._knows_neighbours():
            return
        while self._pending:
            save = self._pending[0]
            mark = self._mark(save)
            del self._pending[0]  # a mark that could not be written is tried again
            if step in (None, save.step) and self.saves.is_last(mark, self._neighbours):
                self._pin(save, mark.save)

    def mark_late(self) -> None:
        """Mark what is still pending, without a pin: rotation may have begun."""
        if not self._pending:
            return
        late, self._pending = self._pending, []
        for save in late:
            self._say(f"{save.checkpoint}: could not be pinned in time; the worker judges it by its files")
        if not self._knows_neighbours():
            self.withdraw()
            return
        for save in late:
            self._mark(save)

    def end(self) -> None:
        """End the training (``on_train_end``); the final model may still be written."""
        for checkpoint in self._uncalled.find_new():
            self._pend(int(checkpoint.rpartition("-")[2]))
        self.commit(None)
        self.saves.update(ended=time.time())

    def leave(self) -> None:
        """State that this process writes nothing more."""
        self.saves.update(left=time.time())

    def withdraw(self) -> None:
        """Take back that this rank will mark its saves: then files decide."""
        ranks.withdraw(self.saves.spool, self.saves.begun)

    def pin_alone(self, source: Source, step: int) -> None:
        """Pin files that only this process writes, at its end."""
        save = self.saves.save_id(source.checkpoint, self.saves.count(source.checkpoint))
        self.saves.pin(source, save, step, (self.me.rank,), self._say)

    def _find_trial(self, state: Any) -> str:
        """Return the directory of this trial of a search.  Raises FileNotFoundError; then files decide."""
        fields = None
        if self.me.last_file == "trainer_state.json":
            fields = {"global_step": state.global_step, "trial_params": getattr(state, "trial_params", None)}
        checkpoint = f"checkpoint-{state.global_step}"
        trial = find_trial(self.me.output_dir, checkpoint, self.me.last_file, fields)
        if not trial:
            self.withdraw()
            raise FileNotFoundError(f"no trial's {checkpoint} below {self.me.output_dir}")
        return trial

    def _pend(self, step: int) -> None:
        checkpoint = f"{self.trial}.checkpoint-{step}" if self.trial else f"checkpoint-{step}"
        if not any(
            save.checkpoint == checkpoint for save in self._pending
        ):  # a just-in-time save over one not yet pinned is one save
            self._pending.append(Save(checkpoint, step, self.saves.count(checkpoint)))

    def _knows_neighbours(self) -> bool:
        """Return whether all ranks have introduced themselves; note in the spool who writes here, once."""
        if not self._neighbours:
            words = self._words()
            if words is None:
                return False
            self._neighbours = ranks.neighbours(self.saves.spool, self.saves.begun, words)
            self.saves.update(train=words[0].partition(" ")[0], local_world=len(self._neighbours))
        return True

    def _mark(self, save: Save) -> RankMark:
        return self.saves.mark(self.saves.save_id(save.checkpoint, save.n), save.checkpoint, save.step)

    def _pin(self, save: Save, save_id: str) -> None:
        path = ranks.path_of(self.me.output_dir, save.checkpoint)
        if not self.me.only_model and not path.is_dir():  # each rank leaves its random state there
            raise Incomplete(
                f"{save.checkpoint}: nothing of it in {self.me.output_dir}: this training saves elsewhere, or has removed it"
            )
        self.saves.pin(Source(save.checkpoint, path, walk, self.added), save_id, save.step, self._neighbours, self._say)


class UncalledSaves:
    """Finds checkpoints that this rank wrote without an ``on_save``: the Trainer's just-in-time save on SIGTERM, or a direct call.

    The file that this rank writes last shows that its part is done.  Other ranks' files show nothing: ranks do not wait
    for each other.
    """

    def __init__(self, me: TrainerRank) -> None:
        self._last_file = me.last_file
        self.follow(me.output_dir)

    def follow(self, folder: Path) -> None:
        """Look for checkpoints in this directory; those that lie there now are known."""
        self._folder = folder
        self._known = {path.name: self._stamp(path) for path in folder.glob("checkpoint-*")}

    def note(self, checkpoint: str) -> None:
        """Note a save that came with an ``on_save``."""
        self._known[checkpoint] = self._stamp(self._folder / checkpoint)

    def is_new(self, checkpoint: str) -> bool:
        """Return whether this rank has finished a save of it that is not known; then it is known."""
        path = self._folder / checkpoint
        stamp = self._stamp(path)
        if stamp is None or stamp == self._known.get(checkpoint) or (path / SENTINEL).exists():
            return False
        self._known[checkpoint] = stamp
        return True

    def find_new(self) -> list[str]:
        """Return every checkpoint of which `is_new` is true."""
        return [path.name for path in sorted(self._folder.glob("checkpoint-*")) if self.is_new(path.name)]

    def _stamp(self, path: Path) -> Stamp | None:
        try:
            state = (path / self._last_file).stat()
        except OSError:
            return None  # not there, or not yet
        return state.st_mtime_ns, state.st_ino


def find_trial(output_dir: Path, checkpoint: str, last_file: str, fields: Mapping[str, Any] | None = None) -> str:
    """Return the directory in which a trial of ``Trainer.hyperparameter_search`` saves; empty if none has a plain name.

    No callback learns its name: ``run-N``, ``run-<id>``, or what the user's ``hp_name`` gives (transformers 5.23,
    ``Trainer._get_output_dir``).  It is where ``last_file`` of the checkpoint is newest, since this rank has just written it.
    ``fields`` must stand in that file, if it is ``trainer_state.json``: searches that share a directory run at the same time.
    """
    found = []
    for path in output_dir.glob(f"*/{checkpoint}/{last_file}"):
        name = path.parent.parent.name
        with contextlib.suppress(OSError, Corrupt):  # gone, or another trial's that is being written
            if _PLAIN.fullmatch(name) and (fields is None or _has(parse(path.read_bytes(), str(path)), fields)):
                found.append((path.stat().st_mtime_ns, name))
    return max(found, default=(0, ""))[1]


def _has(state: Any, fields: Mapping[str, Any]) -> bool:
    """Compare as JSON: NaN is NaN, and tuples are lists."""
    return isinstance(state, dict) and all(json.dumps(state.get(key)) == json.dumps(value) for key, value in fields.items())
