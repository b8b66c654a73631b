"""The hook of Hugging Face's Trainer: keep every checkpoint, even if rotation deletes it.

    from ckptsync.hooks.hf import CkptSyncCallback
    trainer = Trainer(..., callbacks=[CkptSyncCallback()])

Every event is a few system calls on the trainer's own disk.  Errors are logged, and the training
goes on without the hook; the worker then judges the checkpoint by its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ckptsync.checkpoint_dirs import FINAL
from ckptsync.errors import ConfigError
from ckptsync.hooks import added_files, embedded_worker
from ckptsync.hooks.rank_markers import HookLog, at_end, has_failed
from ckptsync.hooks.trainer_saves import TrainerSaves
from ckptsync.spool import safe_files
from ckptsync.walk import SPOOL

MOST_NAMES = 20  # of saves in one line of the log
_log = logging.getLogger("ckptsync.hook")
_callbacks: list[CkptSyncCallback] = []  # those that a training of this process has begun with
_trainings: dict[Path, list[TrainerSaves]] = {}  # of this process, by output directory
_announced: set[int] = set()  # processes that have logged that the hook is on


class CkptSyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed where this is checked
    """The callback of one Trainer.

    ``wait``: for how long the process may stay, when all else is done, until the store has
    everything, in seconds or as `10m`; for machines that are torn down at the end of a job.
    ``store``: a directory or URL to which a process of its own sends, where no worker can be
    installed.  ``run``: the run's name in that store (default: the output directory's, for which
    ``{dir}`` stands).
    """

    def __init__(self, *, store: str = "", wait: float | str = 0.0, run: str = "") -> None:
        self._store, self._run, self._wait = store, run, 0.0
        try:
            self._wait = embedded_worker.parse_wait(wait)
        except ConfigError as e:
            _log.warning("ckptsync: %s; the training does not wait for uploads at its end", e)
        self._saves: TrainerSaves | None = None
        self._folders: set[Path] = set()  # where this is the first rank that writes
        self._problem = ""
        self._log = HookLog()
        self.state: Any = None  # one object for all callbacks of a training
        self._pid = 0

    # --- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Introduce this rank, and write what sharded checkpoints will lack."""
        for callback in [*_callbacks]:
            callback.leave(before=self)
        with self._logged("begin"):
            self._begin(args, state, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember the save: other ranks may still write it."""
        with self._following(args, state, "remember a save") as saves:
            if saves is not None:
                saves.remember(state.global_step)

    def _commit(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        with self._following(args, state, "commit a save") as saves:
            if saves is not None:
                saves.commit(state.global_step)
                self._serve(saves)

    on_step_begin = _commit  # the event after `on_save`
    on_substep_end = _commit  # with accumulated gradients this is still the same step
    on_epoch_begin = _commit  # the event after a save at the end of an epoch
    on_epoch_end = _commit  # the event after the last save of an epoch, or of the training

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit at the last event before ``load_best_model_at_end`` deletes.

        Earlier, another callback's ``on_save`` may log.
        """
        if control.should_training_stop:
            self._commit(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit the last checkpoint; the final model may follow."""
        with self._following(args, state, "end") as saves:
            if saves is not None:
                saves.end(state.global_step)
                self._serve(saves)

    def _begin(self, args: Any, state: Any, given: Any) -> None:
        self.state, self._pid = state, os.getpid()
        output_dir, rank = Path(args.output_dir).absolute(), args.process_index
        if getattr(state, "is_hyper_param_search", False):
            self._log(
                f"{output_dir}: the hook does not follow hyperparameter_search; a worker judges"
                " the trials' checkpoints by their files"
            )
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        safe_files.make_folders(output_dir / SPOOL)
        self._log.spool, self._log.rank = output_dir / SPOOL, rank
        model = given.get("model")
        facts = added_files.about_process()
        if rank == 0:
            facts |= added_files.about_model(model)
        self._saves = TrainerSaves(
            output_dir,
            rank,
            args.world_size,
            trainer=f"transformers {added_files.version_of('transformers')}",
            facts=facts,
            log=self._log,
            only_model=bool(getattr(args, "save_only_model", False)),
        )
        _trainings.setdefault(output_dir, []).append(self._saves)
        if self not in _callbacks:
            _callbacks.append(self)
            at_end(partial(finish, os.getpid()))
        if rank == 0:
            with _quiet_transformers():
                processing = added_files.processing_of(given)
                errors = added_files.write_added(model, processing, self._saves.added)
            for error in errors:
                self._log(error)

    @contextlib.contextmanager
    def _following(self, args: Any, state: Any, what: str) -> Iterator[TrainerSaves | None]:  # noqa: ARG002
        """Yield this rank's saves, if the hook follows this training; log an error."""
        with self._logged(what):
            yield self._saves

    def _serve(self, saves: TrainerSaves) -> None:
        """On the first rank, log the embedded worker's problems; start one where none runs."""
        if not saves.is_first:
            return
        self._folders.add(saves.output_dir)
        problem = embedded_worker.problem(saves.output_dir)
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem
        if self._store:
            embedded_worker.keep_running(saves.output_dir, self._store, self._run)

    # --- the end

    def leave(self, before: CkptSyncCallback | None = None) -> None:
        """Leave this callback's training; pin its final model.

        ``before``: another training begins, which may write over it, and this one is left only if
        it has ended, or the callback is the same.
        """
        saves = self._saves
        if saves is None or self._pid != os.getpid():
            return
        if before in (None, self) or saves.begun.ended:
            self._saves = None
            with self._logged("leave"):
                saves.leave(has_failed=has_failed())

    def wait_for_store(self, since: float) -> None:
        """Wait for the store, and log what it has not got and why.

        ``since``: when the wait of all callbacks began (`time.monotonic`).
        """
        if self._pid != os.getpid():
            return
        for folder in sorted(self._folders):
            with self._logged("wait for the store"):
                if self._wait > 0:
                    embedded_worker.wait(folder, since + self._wait, self._log)
                # once for all trainings of a directory
                if trainings := _trainings.pop(folder, []):
                    self._sum_up(folder, [name for saves in trainings for name in saves.saved])
        self._folders = set()

    def _sum_up(self, folder: Path, saved: Sequence[str]) -> None:
        """Log what the store has of a directory's saves, what it has not, and what to do then."""
        problem = embedded_worker.problem(folder)
        left = [name.rpartition(".")[0] for name in embedded_worker.unstored(folder)]
        stored = list((Counter(saved) - Counter(left)).elements())
        parts = []
        if stored:
            where = f" to {self._store}" if self._store else ""
            parts.append(f"uploaded{where}: {count_saves(stored, folder)}")
        if left:
            worker = "" if problem else embedded_worker.who_uploads(folder)
            why = worker or problem or f"no worker runs for {folder}"
            more, rest = (" yet", "wait for") if worker else ("", "upload")
            command = embedded_worker.push_command(folder, self._store, self._run)
            names = ", ".join(left[:MOST_NAMES])
            names += f" and {len(left) - MOST_NAMES} more" if left[MOST_NAMES:] else ""
            parts.append(f"not uploaded{more}: {names}: {why}; to {rest} the rest: {command}")
        elif problem:
            parts.append(problem)
        if parts:
            self._log("; ".join(parts), again=True)

    # --- errors

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log an error instead of raising it: training comes first."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  # any error: a checkpoint is at stake, and not the training
            self._log(f"could not {what}: {type(e).__name__}: {e}")


def count_saves(names: Sequence[str], folder: Path) -> str:
    """Return how many saves of a directory these are, and whether the final model is among them."""
    count = sum(name != FINAL for name in names)
    final = "and the final model" if FINAL in names else "and no final model"
    return f"{count} save{'' if count == 1 else 's'} of {folder} {final}"


class DefaultCallback(CkptSyncCallback):
    """The callback that `ckptsync.hooks.autoload` gives every Trainer.

    Its options are those of the environment.

    A `CkptSyncCallback` that the script passes wins: this one begins one event later, if no other
    has begun.
    """

    def __init__(self) -> None:
        store, wait, run = (
            os.environ.get(name, "").strip()
            for name in ("CKPTSYNC_STORE", "CKPTSYNC_WAIT", "CKPTSYNC_RUN")
        )
        super().__init__(store=store, wait=wait, run=run)
        self._given: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember what the training begins with."""
        self._given = kwargs

    @contextlib.contextmanager
    def _following(self, args: Any, state: Any, what: str) -> Iterator[TrainerSaves | None]:
        given, self._given = self._given, None
        others = (other for other in _callbacks if other is not self)
        if given is not None and not any(other.state is state for other in others):
            super().on_train_begin(args, state, None, **given)
            pid, begun = os.getpid(), self._saves
            if begun is not None and args.process_index == 0 and pid not in _announced:
                _announced.add(pid)
                _log.warning(
                    "ckptsync: hook active: every save in %s is kept until it is uploaded",
                    begun.output_dir,
                )
        with super()._following(args, state, what) as saves:
            yield saves


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from logging where each configuration was saved."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def finish(pid: int = 0) -> None:
    """Pin the final models and wait for uploads, at the end of process ``pid`` (default: this one).

    Never raises.
    """
    if pid not in (0, os.getpid()):
        return  # a process that the training forked
    since = time.monotonic()
    for callback in _callbacks:
        callback.leave()
    for callback in _callbacks:
        callback.wait_for_store(since)
