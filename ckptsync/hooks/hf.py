"""The hook of Hugging Face's Trainer: keeps every checkpoint, even if rotation deletes it.

    from ckptsync.hooks.hf import CkptSyncCallback
    trainer = Trainer(..., callbacks=[CkptSyncCallback()])

The Trainer's own events say when a save was made and when the next step begins; `TrainerSaves` does
the work.  Every event is a few system calls on the trainer's own disk.  Errors are logged, and the
training goes on without the hook; the worker then judges the checkpoint by its files.
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
from ckptsync.hooks.rank_markers import HookLog, has_failed, run_at_exit
from ckptsync.hooks.trainer_saves import TrainerSaves
from ckptsync.spool import safe_files
from ckptsync.walk import SPOOL

MOST_NAMES = 20  # of saves in one line of the log
_log = logging.getLogger("ckptsync.hook")
_callbacks: list[CkptSyncCallback] = []  # those that a training of this process has begun with
_trainings: dict[Path, list[TrainerSaves]] = {}  # of this process, by output directory
# what is logged once: by process that the hook is on, by process and directory that no worker is
_announced: set[tuple[int, Path | None]] = set()
WORKER_DUE = 60.0
"""Seconds after which a worker of a new output directory has begun."""


class CkptSyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed where this is checked
    """The callback of one Trainer.

    Args:
        store: a directory or URL to which a process of its own sends, where no worker can be
            installed.
        wait: how long the process may stay at its end until the store has everything, in seconds
            or as `10m`; for machines that are torn down at the end of a job.  A value that cannot
            be read is logged and counts as 0.
        run: the run's name in that store; ``{dir}`` stands for the output directory's, the default.

    """

    def __init__(self, *, store: str = "", wait: float | str = 0.0, run: str = "") -> None:
        """Read the options; log a ``wait`` that cannot be read.  Never raises."""
        self._store, self._run, self._wait = store, run, 0.0
        try:
            self._wait = embedded_worker.parse_wait(wait)
        except ConfigError as e:
            _log.warning("ckptsync: %s; the training does not wait for uploads at its end", e)
        self._saves: TrainerSaves | None = None
        self._folders: set[Path] = set()  # where this is the first rank that writes
        self._problem = ""
        self._began = 0.0  # monotonic
        self._log = HookLog()
        self.state: Any = None  # one object for all callbacks of a training
        self._pid = 0

    # --- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Introduce this rank, and write what sharded checkpoints will lack.

        Leaves the trainings of this process that have ended.
        """
        for callback in [*_callbacks]:
            callback.leave(before=self)
        with self._logged("begin"):
            self._begin(args, state, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember the save until the next event: other ranks may still write it."""
        with self._following(args, state, "remember a save") as saves:
            if saves is not None:
                saves.remember(state.global_step)

    def _commit(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Mark and pin the saves that are remembered; start the embedded worker if one is due."""
        with self._following(args, state, "commit a save") as saves:
            if saves is not None:
                saves.commit(state.global_step)
                self._serve(saves)

    on_step_begin = _commit  # the event after `on_save`
    on_substep_end = _commit  # with accumulated gradients this is still the same step
    on_epoch_begin = _commit  # the event after a save at the end of an epoch
    on_epoch_end = _commit  # the event after the last save of an epoch, or of the training

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit if the training stops: the last event before ``load_best_model_at_end`` deletes.

        At other times another callback's ``on_save`` may log, too early.
        """
        if control.should_training_stop:
            self._commit(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Mark and pin the last checkpoint, and note the end; the final model may follow."""
        with self._following(args, state, "end") as saves:
            if saves is not None:
                saves.end(state.global_step)
                self._serve(saves)

    def _begin(self, args: Any, state: Any, event: Any) -> None:
        """Introduce this rank in the output directory, and let rank 0 write the added files.

        Makes the output directory and its spool, and registers `finish` for the end of the process.
        In a hyperparameter search it logs that the hook does nothing, and returns.
        """
        self.state, self._pid, self._began = state, os.getpid(), time.monotonic()
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
        model = event.get("model")
        facts = added_files.describe_process()
        if rank == 0:
            facts |= added_files.describe_model(model)
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
            run_at_exit(partial(finish, os.getpid()))
        if rank == 0:
            self._announce(output_dir)
            with _quiet_transformers():
                processing = added_files.find_processing(event)
                errors = added_files.write_added(model, processing, self._saves.added)
            for error in errors:
                self._log(error)

    def _announce(self, output_dir: Path) -> None:
        """Log, once in a process, that the hook is on, and who uploads."""
        if not _claim_line(None):
            return
        destination = f" to {self._store}" if self._store else " by this node's worker"
        name = f", as the run {self._run.replace('{dir}', output_dir.name)}" if self._run else ""
        _log.warning(
            "ckptsync: hook active: every save in %s is kept until it is uploaded%s%s",
            output_dir,
            destination,
            name,
        )

    def _warn_of_no_worker(self, output_dir: Path) -> None:
        """Log that nobody uploads a directory's saves, if nobody does, and ``store`` is empty.

        Asks once for each directory, `WORKER_DUE` seconds after the training began or later.
        """
        is_early = time.monotonic() - self._began < WORKER_DUE
        if self._store or is_early or not _claim_line(output_dir):
            return
        if not embedded_worker.who_uploads(output_dir):
            command = embedded_worker.push_command(output_dir, "", self._run)
            _log.warning(
                "ckptsync: no worker watches %s: its saves stay in %s until one runs (worker.runs),"
                " or until: %s",
                output_dir,
                output_dir / SPOOL,
                command,
            )

    @contextlib.contextmanager
    def _following(self, args: Any, state: Any, action: str) -> Iterator[TrainerSaves | None]:  # noqa: ARG002
        """Yield this rank's saves, or None if the hook does not follow this training.

        Log errors.
        """
        with self._logged(action):
            yield self._saves

    def _serve(self, saves: TrainerSaves) -> None:
        """Keep the embedded worker running, if there is a ``store``, and log its new problems.

        Without a worker, warn once of that.  Does nothing on other ranks than the first.  Raises
        OSError.
        """
        if not saves.is_first:
            return
        self._folders.add(saves.output_dir)
        problem = embedded_worker.find_problem(saves.output_dir)
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem
        if self._store:
            embedded_worker.keep_running(saves.output_dir, self._store, self._run)
        self._warn_of_no_worker(saves.output_dir)

    # --- the end

    def leave(self, before: CkptSyncCallback | None = None) -> None:
        """Pin the final model of this callback's training, and end it.

        Nothing in a forked process, or without a training.  ``before``: the callback of a training
        that begins and may write over the model; then only a training that has ended, or its own,
        is left.  Errors are logged.
        """
        saves = self._saves
        if saves is None or self._pid != os.getpid():
            return
        if before in (None, self) or saves.begun.ended:
            self._saves = None
            with self._logged("leave"):
                saves.leave(has_failed=has_failed())

    def wait_for_store(self, since: float) -> None:
        """Wait for the store, and log what it has, what not, and why; errors are logged.

        Waits until ``wait`` seconds after ``since`` (`time.monotonic`), when the wait of all
        callbacks began.  Only on the first rank of each directory, and once; nothing in a fork.
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
        """Log which saves the store has, which not and why, and the command that uploads these.

        Without saves it logs the embedded worker's problem, if any.
        """
        problem = embedded_worker.find_problem(folder)
        unstored = [name.rpartition(".")[0] for name in embedded_worker.list_unstored(folder)]
        stored = list((Counter(saved) - Counter(unstored)).elements())
        parts = []
        if stored:
            where = f" to {self._store}" if self._store else ""
            parts.append(f"uploaded{where}: {count_saves(stored, folder)}")
        if unstored:
            worker = "" if problem else embedded_worker.who_uploads(folder)
            why = worker or problem or f"no worker runs for {folder}"
            more, advice = (" yet", "wait for") if worker else ("", "upload")
            command = embedded_worker.push_command(folder, self._store, self._run)
            names = ", ".join(unstored[:MOST_NAMES])
            names += f" and {len(unstored) - MOST_NAMES} more" if unstored[MOST_NAMES:] else ""
            parts.append(f"not uploaded{more}: {names}: {why}; to {advice} the rest: {command}")
        elif problem:
            parts.append(problem)
        if parts:
            self._log("; ".join(parts), again=True)

    # --- errors

    @contextlib.contextmanager
    def _logged(self, action: str) -> Iterator[None]:
        """Log an exception of the block instead of raising it: training comes first."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  # any error: a checkpoint is at stake, and not the training
            self._log(f"could not {action}: {type(e).__name__}: {e}")


def _claim_line(output_dir: Path | None) -> bool:
    """Return True at this process's first call for an output directory, and note it; else False."""
    key = os.getpid(), output_dir
    if key in _announced:
        return False
    _announced.add(key)
    return True


def count_saves(names: Sequence[str], folder: Path) -> str:
    """Return, in words, how many saves these are and whether the final model is among them."""
    count = sum(name != FINAL for name in names)
    final = "and the final model" if FINAL in names else "and no final model"
    return f"{count} save{'' if count == 1 else 's'} of {folder} {final}"


class DefaultCallback(CkptSyncCallback):
    """The callback that `ckptsync.hooks.autoload` gives every Trainer.

    Its options are the environment's.  A `CkptSyncCallback` that the script passes wins: this one
    begins one event later, if no other has begun.
    """

    def __init__(self) -> None:
        """Read the options from the environment."""
        store, wait, run = (
            os.environ.get(name, "").strip()
            for name in ("CKPTSYNC_STORE", "CKPTSYNC_WAIT", "CKPTSYNC_RUN")
        )
        super().__init__(store=store, wait=wait, run=run)
        self._begin_event: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember what the training begins with, until its next event."""
        self._begin_event = kwargs

    @contextlib.contextmanager
    def _following(self, args: Any, state: Any, action: str) -> Iterator[TrainerSaves | None]:
        """Yield this rank's saves.

        At the first event, begin unless another callback follows the training.
        """
        begin_event, self._begin_event = self._begin_event, None
        other_callbacks = (callback for callback in _callbacks if callback is not self)
        if begin_event is not None and not any(
            callback.state is state for callback in other_callbacks
        ):
            super().on_train_begin(args, state, None, **begin_event)
        with super()._following(args, state, action) as saves:
            yield saves


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' messages below a warning within the block."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def finish(pid: int = 0) -> None:
    """Pin the final models and wait for uploads, at the end of process ``pid`` (default: this one).

    Does nothing in a process that the training forked.  Never raises.
    """
    if pid not in (0, os.getpid()):
        return  # a process that the training forked
    since = time.monotonic()
    for callback in _callbacks:
        callback.leave()
    for callback in _callbacks:
        callback.wait_for_store(since)
