"""A rank's saves of Hugging Face's Trainer: remembers, marks and pins each.

``on_save`` is too early to pin: other ranks still write, and other callbacks may write again.  The
next event of this rank comes after all of its own writing, and before it takes part in the next
gradient, without which no rank saves again or rotates.  So the rank marks the save in that event,
and a pin that the last rank makes in it holds all files, whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptsync.checkpoint_dirs import FINAL, WEIGHTS, final_names
from ckptsync.errors import Incomplete
from ckptsync.hooks import process_group
from ckptsync.hooks.pin_checkpoint import Log
from ckptsync.hooks.process_group import Words
from ckptsync.hooks.rank_markers import RankSaves
from ckptsync.walk import Listing, walk

Exchange = Callable[[int, int, str], Words]


class TrainerSaves(RankSaves):
    """One rank's saves of one training.

    The constructor writes the rank's introduction, and sets its process id in torch's rendezvous;
    if that fails, it withdraws the introduction and raises.  ``only_model``: ranks write no states
    of their own.  ``exchange``: as `process_group.exchange`.  Every method may raise OSError, one
    of ckptsync's errors or one of torch's; none waits for a rank.
    """

    def __init__(
        self,
        output_dir: Path,
        rank: int,
        world: int,
        *,
        trainer: str,
        facts: Mapping[str, str],
        log: Log,
        only_model: bool = False,
        exchange: Exchange = process_group.exchange,
    ) -> None:
        """Write the introduction, and set this rank's process id in torch's rendezvous.

        If the latter fails, the introduction is deleted again, and the error raised.
        """
        self._weights = list_weights(output_dir)  # of another training
        super().__init__(output_dir, rank, world, trainer=trainer, facts=facts, log=log)
        self._only_model = only_model
        self.saved: list[str] = []  # names of the saves that this rank has marked or pinned
        self._pending: list[tuple[int, int]] = []  # step, and the saves of it before this one
        self._writers: tuple[int, ...] = ()
        self._step = 0
        try:
            self._words = exchange(rank, world, self.begun.process)
        except Exception:
            self.withdraw()
            raise

    @property
    def added(self) -> Path:
        """Return where rank 0 writes the files that a sharded checkpoint lacks."""
        return self.spool / "added" / (self.begun.train or self.begun.process)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank that writes here.

        False until ranks know each other.
        """
        return self._writers[:1] == (self.begun.rank,)

    def remember(self, step: int) -> None:
        """Remember a save of ``on_save`` until the next event.

        An earlier one that is still pending is marked, and not pinned: it is too late.
        """
        if self._pending:
            self.commit(-1)
        self._pending.append((step, self.count(f"checkpoint-{step}")))

    def commit(self, step: int | None) -> None:
        """Mark the pending saves, and pin each if this rank is the last to mark it.

        Does nothing while a rank is still missing, if the pending saves are of ``step``.
        ``step``: the training's, None after its end.  Saves of other steps are marked only, since
        rotation may have begun.  If not all ranks have a hook, the introduction is withdrawn.
        Raises Incomplete if the checkpoint is not in this output directory.
        """
        if not self._writers and not self._meet():
            if any(step not in (None, saved_step) for saved_step, _ in self._pending):
                self._pending.clear()
                self.withdraw()
                self._log(f"{self.spool}: not all ranks have a hook; the worker judges the files")
            return
        while self._pending:
            saved_step, n = self._pending[0]
            name = f"checkpoint-{saved_step}"
            save = self.save_id(name, n)
            self.mark(name, save, saved_step)
            del self._pending[0]  # a mark that could not be written is tried again
            self.saved.append(name)
            if step not in (None, saved_step):
                self._log(f"{name}: could not be pinned in time; the worker judges its files")
            elif self.claim_pinning(name, save, self._writers):
                path = self.output_dir / name
                if not self._only_model and not path.is_dir():  # each rank writes its random state
                    raise Incomplete(
                        f"{name}: not found in {self.output_dir}: this training saves to another"
                        " directory, or has deleted it"
                    )
                self.pin(path, name, save, saved_step, self._writers, added=self.added)

    def end(self, step: int) -> None:
        """End the training (``on_train_end``): commit the pending saves, and note the end.

        The final model may still be written.
        """
        self._step = step
        self.commit(None)
        self.update(ended=time.time())

    def leave(self, *, has_failed: bool = False) -> None:
        """Pin the final model, if the training has ended, and note that this process has left.

        Only the first rank pins it, and nobody with ``has_failed`` or if a pin has it already.
        Pending saves are committed before.  The final model is what lies in the output directory
        after a training that ended, if it was written since the training began.  The Trainer has
        no event after ``save_model``.
        """
        if self.begun.ended and not has_failed:
            self.commit(None)
            is_new = self.is_first and list_weights(self.output_dir) != self._weights
            if is_new and not self.is_pinned(FINAL, list_final_model(self.output_dir)):
                self.pin(
                    self.output_dir,
                    FINAL,
                    self.save_id(FINAL, self.count(FINAL)),
                    self._step,
                    (self.begun.rank,),
                    list_files=list_final_model,
                )
            if is_new:
                self.saved.append(FINAL)
        self.update(left=time.time())

    def _meet(self) -> bool:
        """Note which ranks write here, in the introduction, too; return whether all are there.

        Returns False, and changes nothing, while a rank is missing in the rendezvous.  Raises
        Incomplete if somebody has deleted the spool.
        """
        words = self._words()
        if words is None:
            return False
        self._writers = self.writers(words)
        if not self._writers:  # the spool was deleted
            raise Incomplete(f"{self.spool}: deleted; the worker judges the files")
        self.update(train=words[0], local_world=len(self._writers))
        return True


def list_weights(output_dir: Path) -> frozenset[tuple[str, int, int]]:
    """Return path, inode and mtime of each weights file of a final model.

    Empty without a directory.
    """
    with contextlib.suppress(FileNotFoundError):
        return frozenset(
            (f.path, f.inode, f.mtime)
            for f in list_final_model(output_dir).files
            if WEIGHTS.fullmatch(f.path.rpartition("/")[2])
        )
    return frozenset()


def list_final_model(output_dir: Path) -> Listing:
    """Return the final model's files in a directory; raise FileNotFoundError if that is missing."""
    with os.scandir(output_dir) as entries:
        return walk(output_dir, final_names(output_dir, list(entries)))
