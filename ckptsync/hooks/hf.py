"""``CkptSyncCallback`` for Hugging Face's Trainer: every checkpoint is kept, also where rotation deletes it at once.

    from ckptsync.hooks.hf import CkptSyncCallback
    trainer = Trainer(..., callbacks=[CkptSyncCallback()])

Every event is a few system calls on the trainer's own disk.  Errors are logged, and the training goes on without the hook; the
worker then judges the checkpoint by its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ckptsync.errors import ConfigError
from ckptsync.hooks import embedded, ending, model_facts
from ckptsync.hooks.ending import Weights
from ckptsync.hooks.hf_saves import TrainerRank, TrainerSaves
from ckptsync.hooks.pinning import Source
from ckptsync.hooks.saves import HookLog
from ckptsync.spool import folders
from ckptsync.walk import OURS

_log = logging.getLogger("ckptsync.hook")
_WORKER_GONE = 2.0  # seconds after which nobody waits for an embedded worker: no service restarts it
_callbacks: weakref.WeakSet[CkptSyncCallback] = weakref.WeakSet()  # those that a training has begun with


class CkptSyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed where this is checked
    """The callback of one Trainer.

    ``wait``: for how long the process may stay, when all else is done, until the store has everything, in seconds or as `10m`; for machines
    that are torn down at the end of a job.  ``store``: a directory or URL to which a child process sends, where no worker
    can be installed.  ``run``: its name in that store (default: the output directory's).
    """

    announces = False  # whether it logs that it is on

    def __init__(self, *, store: str = "", wait: float | str = 0.0, run: str = "") -> None:
        self._store, self._run = store, run
        self._wait, self._wait_error = 0.0, ""
        try:
            self._wait = embedded.parse_wait("CkptSyncCallback(wait=…)", wait)
        except ConfigError as e:
            self._refuse_wait(e)
        self._me: TrainerRank | None = None
        self._saves: TrainerSaves | None = None
        self._forget_end: Callable[[], object] = bool
        self._weights: Weights = frozenset()  # of the run's root, as far as they are not this training's
        self._step = 0
        self._former: list[tuple[Path, str]] = []
        self._problem = ""
        self._hook_log = HookLog()
        self._state: Any = None

    def _refuse_wait(self, error: ConfigError) -> None:
        """Log now, and again at the end, that the process does not wait for the store."""
        self._wait_error = f"{error}; nobody waits for the store at the end, and all else is done"
        _log.warning("ckptsync: %s", self._wait_error)

    # --- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Introduce this rank, and write what sharded checkpoints will lack."""
        self._state = state
        _callbacks.add(self)
        for callback in [*_callbacks]:
            callback.pin_model()
            if isinstance(callback, Appended) and callback.is_beside(self):
                callback.give_way()
        with self._logged("leave the training before"):
            self._leave_training()
        with self._logged("begin"):
            self._begin(args, kwargs.get("model"), model_facts.processing_of(kwargs))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remember the save: other ranks may still write it."""
        if self._saves is not None:
            with self._logged("mark a save"):
                self._saves.mark_late()
            with self._logged("remember a save"):
                self._saves.remember(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit: the event after ``on_save``."""
        self._commit(state, control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit: with accumulated gradients this is still the same step."""
        self._commit(state, control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit: the event after a save at the end of an epoch."""
        self._commit(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit: the event after the last save of an epoch, or of the training."""
        self._commit(state, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit at the last event before ``load_best_model_at_end`` deletes; earlier, another callback's ``on_save`` may log."""
        if control.should_training_stop:
            self._commit(state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit a just-in-time save; for any other it is too late to be pinned."""
        if self._saves is not None:
            with self._logged("mark a save"):
                self._saves.mark_late()
            if control.should_training_stop:
                self._commit(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Commit a just-in-time save."""
        self.on_pre_optimizer_step(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Commit the last checkpoint; the final model may follow."""
        if self._saves is not None:
            self._step = state.global_step
            with self._logged("end"):
                self._saves.end()

    # --- beginning and committing

    def _begin(self, args: Any, model: Any, processing: Any) -> None:
        me = TrainerRank(
            output_dir=Path(args.output_dir).absolute(),
            rank=args.process_index,
            world=args.world_size,
            has_state=bool(args.should_save),
            only_model=bool(getattr(args, "save_only_model", False)),
            trainer=f"transformers {model_facts.version_of('transformers')}",
        )
        self._me = me
        me.output_dir.mkdir(parents=True, exist_ok=True)
        folders.make(me.output_dir / OURS)
        self._weights = ending.weights(me.output_dir)
        facts = model_facts.about_process() | (model_facts.about_model(model) if me.rank == 0 else {})
        self._saves = TrainerSaves(me, facts, partial(self._write_log, me=me))
        self._forget_end = ending.at_end(partial(self._at_exit, self._saves))
        if me.rank == 0:
            with _quiet_transformers():
                errors = model_facts.write_added(model, processing, self._saves.added)
            for error in errors:
                self._write_log(error)

    def _commit(self, state: Any, control: Any) -> None:
        if self._saves is None:
            return
        with self._logged("commit a save"):
            self._announce(self._saves.me)
            if control.should_training_stop:
                self._saves.find_uncalled(state.global_step)
            self._saves.commit(state.global_step)
            self._check_worker(self._saves)

    def _announce(self, me: TrainerRank) -> None:
        if self.announces and me.rank == 0:
            FromEnvironment.announces = False  # once in a process
            _log.warning("ckptsync: on: every save of %s is kept until it is stored", me.output_dir)

    def _check_worker(self, saves: TrainerSaves) -> None:
        """Start the embedded worker of this directory as soon as it is known who is first here, and log its problems."""
        folder = saves.me.output_dir
        if self._store and saves.is_first:
            embedded.keep_running(folder, self._store, self._run)
        problem = embedded.problem(folder)
        if problem and problem != self._problem:
            self._write_log(problem)
        self._problem = problem

    # --- the end

    def is_beside(self, other: CkptSyncCallback) -> bool:
        """Return whether both are of one training: the Trainer's state is one object for all its callbacks."""
        return other is not self and other._state is self._state

    def leave(self) -> None:
        """Do what is to be done at the interpreter's end."""
        if self._saves is not None:
            saves, self._saves = self._saves, None
            self._forget_end()
            self._at_exit(saves)

    def pin_model(self) -> None:
        """Pin the final model now: another training begins, and may write over it; the end of the script may be long after."""
        saves = self._saves
        if saves is not None and saves.saves.begun.ended and saves.saves.begun.pid == os.getpid():
            with self._logged("pin the last save"):
                self._pin_last(saves)

    def know_weights(self, root: Path, weights: Weights) -> None:
        """Note that another training has pinned these weights: of several in one directory the last one has written them."""
        if self._saves is not None and self._saves.me.output_dir == root:
            self._weights = weights

    def _leave_training(self) -> None:
        """Leave the training before: one callback may see several, resumed ones, and tries with smaller batches."""
        if self._saves is not None:
            former, self._saves = self._saves, None
            self._forget_end()
            self._former.append((former.me.output_dir, former.saves.begun.train))
            former.leave()

    def _at_exit(self, saves: TrainerSaves) -> None:
        """Pin the final model and leave, when the script is over; not in a process that the training forked."""
        if os.getpid() != saves.saves.begun.pid:
            return
        with self._logged("pin the last save"):
            if not ending.has_failed():
                self._pin_last(saves)
        with self._logged("leave"):
            saves.leave()
            if saves.is_first:
                self._finish(saves)
        if self._wait_error and saves.me.rank == 0:
            self._write_log(self._wait_error, again=True)

    def _pin_last(self, saves: TrainerSaves) -> None:
        saves.commit(None)
        root = saves.me.output_dir
        now = ending.weights(root)
        if not (saves.saves.begun.ended and saves.is_first) or now == self._weights:
            return
        saves.pin_alone(Source("final", root, ending.final_model), self._step)
        for callback in [*_callbacks]:
            callback.know_weights(root, now)

    def _finish(self, saves: TrainerSaves) -> None:
        """Wait for the store, and log what it has not got and why, for each directory of this callback's trainings."""
        trains = {saves.me.output_dir: {saves.saves.begun.train}}
        for folder, train in self._former:
            trains.setdefault(folder, set()).add(train)
        for folder, named in trains.items():
            if self._wait > 0:
                self._wait_for_store(folder, named - {""})
            self._sum_up(folder, ending.unstored(folder, named - {""}))

    def _wait_for_store(self, folder: Path, trains: Collection[str]) -> None:
        if embedded.is_running(folder) and (problem := embedded.problem(folder)):
            self._write_log(problem, again=True)
        ending.wait(
            folder,
            trains,
            self._wait,
            self._write_log,
            served=lambda spool: ending.is_served(spool) or embedded.is_running(folder),
            restart=_WORKER_GONE if embedded.is_started(folder) else ending.RESTART,
            since=ending.end_began(),
        )

    def _sum_up(self, folder: Path, left: Collection[str]) -> None:
        problem = embedded.problem(folder)
        if left and problem:
            command = embedded.push_command(folder, self._store, self._run)
            names = ", ".join(name.rpartition(".")[0] for name in left)
            self._write_log(f"not stored: {names}: {problem}; then send what is left: {command}", again=True)
        elif problem:
            self._write_log(problem, again=True)
        elif not left and self._wait > 0:
            where = f", in {self._store}" if self._store else ""
            self._write_log(f"all is stored that was kept of {folder}{where}", again=True)

    # --- errors

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log an error instead of raising it: training comes first."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  # any error: a checkpoint is at stake, and not the training
            self._write_log(f"could not {what}: {type(e).__name__}: {e}")

    def _write_log(self, text: str, *, me: TrainerRank | None = None, again: bool = False) -> None:
        me = me or self._me
        if me is None:
            self._hook_log.write(text, again=again)
        else:
            self._hook_log.write(text, me.output_dir / OURS, me.rank, again=again)


class FromEnvironment(CkptSyncCallback):
    """The callback with the options of the environment, for scripts that pass none; logs once in a process that it is on."""

    announces = True

    def __init__(self) -> None:
        options = embedded.from_environment(os.environ)
        super().__init__(store=options.store, wait=options.wait, run=options.run)
        if options.error:
            self._refuse_wait(options.error)


class Appended(FromEnvironment):
    """The same, appended to every Trainer by `ckptsync.hooks.autoload`; a `CkptSyncCallback` that the script passes wins.

    The Trainer calls either of the two first.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, unless another callback has begun this training."""
        self._state = state
        if not any(callback.is_beside(self) for callback in _callbacks):
            super().on_train_begin(args, state, control, **kwargs)
            return
        with self._logged("leave the training before"):
            self._leave_training()

    def give_way(self) -> None:
        """Leave this training to another callback, before the first step."""
        with self._logged("give way"):
            if self._saves is not None:
                saves, self._saves = self._saves, None
                self._forget_end()
                saves.withdraw()


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


def leave() -> None:
    """Do all callbacks' work of the interpreter's end, in a process that Ray will kill after its trainings.  Never raises."""
    for callback in [*_callbacks]:
        callback.leave()
