"""``CkptSyncCallback`` for Hugging Face's Trainer: with it every checkpoint is taken, also where rotation leaves none for long.

    from ckptsync.hooks.hf import CkptSyncCallback
    trainer = Trainer(..., callbacks=[CkptSyncCallback()])

Every event is a few system calls on the trainer's own disk.  What goes wrong is logged, and the training goes on without it; the
worker then judges the checkpoint by its files, as it does without a hook.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ckptsync.errors import ConfigError
from ckptsync.hooks import added, asked, embedded, leaving
from ckptsync.hooks.here import Here
from ckptsync.hooks.leaving import Weights
from ckptsync.hooks.pinning import Source
from ckptsync.hooks.saver import Saver
from ckptsync.hooks.trials import trial_of
from ckptsync.spool import folders, marks
from ckptsync.walk import OURS

_log = logging.getLogger("ckptsync.hook")
_AT_WORK = 60.0  # seconds
_ITS_END = 2.0  # seconds after it nobody waits for an embedded worker: there is no service that begins it again
_hearing: weakref.WeakSet[CkptSyncCallback] = weakref.WeakSet()


class CkptSyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed where this is checked
    """One for each Trainer.

    ``wait``: for how long the process may stay, when all else is done, until the store has everything, in seconds or as `10m`; for machines
    that are torn down at the end of a job.  ``store``: a directory or URL to send to, from a child process; where no worker can be installed.
    ``run``: its name in that store, if not the output directory's own.
    """

    def __init__(self, *, store: str = "", wait: float | str = 0.0, run: str = "") -> None:
        self._store, self._run = store, run
        self._wait, self._not_waiting = 0.0, ""
        try:
            self._wait = asked.seconds("CkptSyncCallback(wait=…)", wait)
        except ConfigError as e:
            self._refuse_wait(e)
        self._workers: dict[Path, tuple[embedded.Worker, float] | None] = {}
        self._ended: dict[Path, str] = {}
        self._saver: Saver | None = None
        self._forget_end: Callable[[], object] = bool
        self._before: Weights = frozenset()
        self._step = 0
        self._former: list[tuple[Path, str]] = []
        self._said: set[str] = set()
        self._state: Any = None

    def _refuse_wait(self, why: ConfigError) -> None:
        """Say now, and once more at the end, that nobody waits for the store."""
        self._not_waiting = f"{why}; nobody waits for the store at the end, and all else is done"
        _log.warning("ckptsync: %s", self._not_waiting)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Say who trains here, and write what sharded checkpoints will lack."""
        self._state = state
        _hearing.add(self)
        for callback in [*_hearing]:
            callback.keep_model()
        with self._unharmed("leave the training before"):
            self._leave_former()
        with self._unharmed("begin"):
            self._begin(args, kwargs.get("model"), added.processing_of(kwargs))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Too early for anything but to remember it."""
        if self._saver is not None:
            with self._unharmed("mark a save"):
                self._saver.late()
            with self._unharmed("remember a save"):
                self._remember(self._saver, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The event after ``on_save``."""
        self._commit(state, control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """With gradients accumulated, still the same step."""
        self._commit(state, control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The event after a save at the end of an epoch."""
        self._commit(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The event after the last save of an epoch, or of the training."""
        self._commit(state, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The last event before ``load_best_model_at_end`` deletes; earlier, another callback's ``on_save`` may log."""
        if control.should_training_stop:
            self._commit(state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Trainer's just-in-time save may just have been made; for any other it is too late to be pinned."""
        if self._saver is not None:
            with self._unharmed("mark a save"):
                self._saver.late()
            if control.should_training_stop:
                self._commit(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same."""
        self.on_pre_optimizer_step(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The last checkpoint; the final model may follow."""
        if self._saver is not None:
            self._step = state.global_step
            with self._unharmed("end"):
                self._saver.end()

    def is_beside_another(self, state: Any) -> bool:
        """Whether another one was told that this training begins: Trainer's state is one object for all its callbacks."""
        return any(other is not self and other._state is state for other in _hearing)  # noqa: SLF001  # one of our own

    def stand_aside(self) -> None:
        """The training that begins is another's; the one before may have been this one's."""
        with self._unharmed("leave the training before"):
            self._leave_former()

    def leave(self) -> None:
        """What the end of the interpreter would do."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            self._forget_end()
            self._at_exit(saver)

    def keep_model(self) -> None:
        """Another training begins: what this one has left in the run's root may be written over, and the end of the script be long after."""
        saver = self._saver
        if saver is not None and saver.begun.ended and saver.begun.pid == os.getpid():
            with self._unharmed("pin the last save"):
                self._pin_last(saver)

    def _remember(self, saver: Saver, state: Any) -> None:
        if state.is_hyper_param_search and not saver.trial:
            said = {"global_step": state.global_step, "trial_params": getattr(state, "trial_params", None)}
            is_state = saver.last == "trainer_state.json"
            trial = trial_of(saver.here.output_dir, f"checkpoint-{state.global_step}", saver.last, said if is_state else None)
            if not trial:
                saver.withdraw()  # then files decide
                raise FileNotFoundError(f"no trial's checkpoint-{state.global_step} below {saver.here.output_dir}")
            saver.follow(trial)
        saver.remember(state.global_step)

    def _commit(self, state: Any, control: Any) -> None:
        if self._saver is not None:
            with self._unharmed("commit a save"):
                if control.should_training_stop:
                    self._saver.listen(state.global_step)
                self._saver.commit(state.global_step)
                self._watch_worker(self._saver)

    def _watch_worker(self, saver: Saver) -> None:
        """Start the embedded worker of this directory as soon as it is known who is first here, and say if it ended."""
        folder = saver.here.output_dir
        if self._store and saver.is_first and folder not in self._workers and not embedded.is_covered(folder):
            self._workers[folder] = embedded.begin(saver.here, self._store, self._run, saver.begun.pid), time.monotonic()
            self._ended.pop(folder, None)
        if heard := self._hear_worker(folder) or self._waits(folder):
            self._say(saver.here, heard)

    def _hear_worker(self, folder: Path) -> str:
        """Return how the embedded worker of this directory ended, once and if with an error."""
        worker, since = self._workers.get(folder) or (None, 0.0)
        if worker is not None and worker.poll():
            self._workers[folder] = None
            if time.monotonic() - since >= _AT_WORK:
                del self._workers[folder]  # what it could not do would have shown before: it was killed, and another one goes on
            why = embedded.last_error(folder / OURS) or f"see {embedded.LOG} in {folder / OURS}"
            self._ended[folder] = f"the embedded worker ended with exit code {worker.returncode}: {why}"
            return self._ended[folder]
        return ""

    def _waits(self, folder: Path) -> str:
        """Return what the embedded worker of this directory waits for before it can send anything."""
        why = embedded.waits_for(folder / OURS) if self._workers.get(folder) else ""
        return f"the embedded worker has no store yet: {why}" if why else ""

    def _begin(self, args: Any, model: Any, processing: Any) -> None:
        folder = Path(args.output_dir).absolute()
        has_state, only_model = bool(args.should_save), bool(getattr(args, "save_only_model", False))
        trainer = f"transformers {added.version_of('transformers')}"
        here = Here(folder, args.process_index, args.world_size, has_state, only_model, trainer)
        folder.mkdir(parents=True, exist_ok=True)
        folders.make(here.spool)
        self._before = leaving.weights(folder)
        facts = added.about_process() | (added.about_model(model) if here.rank == 0 else {})
        saver = Saver(here, facts, lambda text: self._say(here, text))
        self._saver = saver
        self._forget_end = leaving.at_end(partial(self._at_exit, saver))
        if here.rank == 0:
            with _quietly():
                troubles = added.write_added(model, processing, saver.added)
            for trouble in troubles:
                self._say(here, trouble)

    def _leave_former(self) -> None:
        """One callback may see several trainings: resumed ones, and tries with smaller batches."""
        if self._saver is not None:
            former, self._saver = self._saver, None
            self._forget_end()
            self._former.append((former.here.output_dir, former.begun.train))
            former.leave()

    def _at_exit(self, saver: Saver) -> None:
        """When the script is over; a process that it forked is not ours to speak of."""
        if os.getpid() != saver.begun.pid:
            return
        with self._unharmed("pin the last save"):
            if not leaving.has_failed():
                self._pin_last(saver)
        with self._unharmed("leave"):
            saver.leave()
            if saver.is_first:
                self._finish(saver)
        if self._not_waiting and saver.here.rank == 0:
            self._say_last(saver.here, self._not_waiting)

    def _finish(self, saver: Saver) -> None:
        """Wait for the store, and say what it has not got and why, in every directory that this callback has seen trainings in."""
        trains = {saver.here.output_dir: {saver.begun.train}}
        for folder, train in self._former:
            trains.setdefault(folder, set()).add(train)
        for folder, named in trains.items():
            if self._wait > 0:
                if waits := self._waits(folder):
                    self._say_last(saver.here, waits)
                self._wait_there(folder, named - {""}, lambda text: self._say(saver.here, text))
            self._hear_worker(folder)
            self._sum_up(saver.here, folder, leaving.unstored(folder, named - {""}))

    def _sum_up(self, here: Here, folder: Path, left: Collection[str]) -> None:
        why = self._ended.get(folder) or embedded.why_ended(folder) or self._waits(folder)
        if left and why:
            command = embedded.push_command(folder, self._store, self._run)
            names = ", ".join(name.rpartition(".")[0] for name in left)
            self._say_last(here, f"not stored: {names}: {why}; then send what is left: {command}")
        elif why:
            self._say_last(here, why)
        elif not left and self._wait > 0:
            self._say_last(here, f"all is stored that was kept of {folder}{f', in {self._store}' if self._store else ''}")

    def _wait_there(self, folder: Path, trains: Collection[str], say: Callable[[str], None]) -> None:
        worker, _ = self._workers.get(folder) or (None, 0.0)

        def served(spool: Path) -> bool:
            return leaving.is_served(spool) or (worker is not None and worker.poll() is None)

        patience = _ITS_END if folder in self._workers else leaving.RESTART
        leaving.wait(folder, trains, self._wait, say, served=served, restart=patience, since=leaving.over())

    def _pin_last(self, saver: Saver) -> None:
        saver.commit(None)
        root, before = saver.here.output_dir, self._before
        now = leaving.weights(root)
        if not (saver.begun.ended and saver.is_first) or now == before:
            return
        saver.pin_alone(Source("final", root, leaving.final_model), self._step)
        for callback in [*_hearing]:
            callback.know_model(root, now)

    def know_model(self, root: Path, weights: Weights) -> None:
        """These are no news any more: of several trainings in one directory the last one has written them."""
        if self._saver is not None and self._saver.here.output_dir == root:
            self._before = weights

    @contextlib.contextmanager
    def _unharmed(self, what: str) -> Iterator[None]:
        """Training comes first: no exception of ours reaches it."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  # whatever it is: a checkpoint is at stake, and not the training
            self._say(self._saver.here if self._saver else None, f"could not {what}: {type(e).__name__}: {e}")

    def _say_last(self, here: Here, text: str) -> None:
        """Say at the end of the script what was perhaps said before, in a log that is long by now."""
        self._said.clear()
        self._say(here, text)

    def _say(self, here: Here | None, text: str) -> None:
        """Each time in the spool's log, where the worker reads it; the first time of its kind in the trainer's, too."""
        if here is not None:
            with contextlib.suppress(OSError):  # the spool may be what is wrong
                marks.say(here.spool, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rank {here.rank}: {text}")
        kind = re.sub(r"[0-9]+", "", text)[:80]
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("ckptsync: %s", text)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """transformers says of each configuration where it was saved, and a training's log is not ours to write in."""
    its = logging.getLogger("transformers")
    level = its.level
    its.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        its.setLevel(level)


def leave() -> None:
    """For a process that will be killed, as Ray ends its workers, once all its trainings have ended well.  Never raises."""
    for callback in [*_hearing]:
        callback.leave()
