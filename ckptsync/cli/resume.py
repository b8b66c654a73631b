"""``ckptsync resume``: run a training from the newest checkpoint that all nodes have.

A scheduler can restart a training at any time with the same command.  The package `resume` agrees
on a checkpoint with the other nodes, and runs the training; this module puts its steps together:
prepare, train with a worker beside it, restart after a failure, and wait until all is uploaded.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptsync.child import describe_end
from ckptsync.cli import output
from ckptsync.cli.arguments import access_of, option_value
from ckptsync.cli.drain import Upload, add_output_dir, has_entries, note, upload_of
from ckptsync.errors import CkptsyncError
from ckptsync.hooks import embedded_worker
from ckptsync.quantities import backoff, parse_duration
from ckptsync.resume.attempt import Attempt, next_try, read_attempt
from ckptsync.resume.drain import DrainResult, TrainingMark, describe, drain
from ckptsync.resume.prepare import PrepareOptions, Start, prepare
from ckptsync.resume.training import (
    Signals,
    exit_code_of,
    find_program,
    read_signal_map,
)
from ckptsync.resume.training_command import (
    TRAINERS,
    Resumed,
    check_command,
    check_nodes_of_command,
    command_for,
    environment_for,
)
from ckptsync.spool.markers import write_log
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import SPOOL

FIRST, LONGEST = 10.0, 300.0  # seconds between a failure and the next try
_LOOK_EVERY, _POLL = 1.0, 0.2  # seconds
DETAILS = (
    "In COMMAND, {checkpoint} and {step} stand for the checkpoint; with nothing to resume from,"
    " the arguments that contain them are left out. Run it on every node. The exit code is the"
    " training's, 128 and the signal's number if a signal ended it."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    command.usage = "%(prog)s OUT [options] -- COMMAND …"
    command.set_defaults(training=())  # what follows `--`
    add_output_dir(command)
    add(
        "--for",
        dest="trainer",
        choices=sorted(TRAINERS),
        help="append to COMMAND what this trainer needs, in place of {checkpoint}",
    )
    add(
        "--nnodes",
        metavar="N",
        type=int,
        help="how many nodes train together (default: as the launcher's variables say, or 1)",
    )
    add(
        "--attempt",
        metavar="NAME",
        help="a name of this start, the same on all nodes (default: the scheduler's job and"
        " restart, or the launcher's)",
    )
    add(
        "--wait",
        metavar="TIME",
        default="5m",
        help="wait at most so long for the other nodes (default: 5m)",
    )
    add(
        "--trust",
        choices=("verified", "complete"),
        default="verified",
        help="resume from the newest checkpoint that is VERIFIED (default), or only COMPLETE",
    )
    add("--require", action="store_true", help="fail where there is no checkpoint to resume from")
    add(
        "--keep-newer",
        action="store_true",
        help="leave newer and torn checkpoints in OUT where they are, instead of renaming them",
    )
    add("--no-worker", action="store_true", help="start no worker; one of this node uploads")
    add(
        "--drain",
        metavar="TIME",
        default="10m",
        help="when the training has ended, wait at most so long until its saves are stored"
        " (default: 10m); a second signal ends the waiting",
    )
    add(
        "--restarts",
        metavar="N",
        type=int,
        default=0,
        help="start a training that fails again, N times; a failure before any new save counts"
        " twice",
    )
    add(
        "--signal-map",
        metavar="SIGNAL=SIGNAL",
        action="append",
        help="give the training another signal, such as USR1=TERM; HUP=NONE: none",
    )


def run(args: argparse.Namespace) -> int:
    """Agree, get the checkpoint, run the training, upload; return the last training's exit code.

    A training that fails is started again up to ``--restarts`` times.  Without a store, only local
    checkpoints count, and nothing is uploaded.  Raises ConfigError before anything starts, and the
    errors of `prepare`.
    """
    command = list(args.training)
    check_command(command, args.trainer or "")
    find_program(command[0])
    signals = Signals(read_signal_map(args.signal_map or ()))
    wait = option_value("--wait", parse_duration, args.wait)
    drain_for = option_value("--drain", parse_duration, args.drain)
    has_store = bool(args.url or args.config or os.environ.get("CKPTSYNC_STORE"))
    upload = upload_of(args) if has_store else upload_of(args, MemoryStore(), "memory://")
    upload.has_worker = has_store and not args.no_worker
    attempt = read_attempt(
        os.environ, upload.node, secrets.token_hex(8), name=args.attempt, nnodes=args.nnodes
    )
    check_nodes_of_command(command, attempt.nnodes)
    options = PrepareOptions(
        upload.store if has_store else None,
        upload.run.name,
        trust=args.trust,
        wait=wait,
        keep_newer=args.keep_newer,
        require=args.require,
        node=upload.node if attempt.nnodes > 1 else "",
        threads=access_of(args).limits.threads,
        say=note,
    )

    def prepare_attempt(attempt: Attempt) -> Start:
        """Prepare, and show the progress of the download."""
        with output.progress(args, f"downloading {upload.run.name}") as progress:
            return prepare(upload.run.path, attempt, replace(options, progress=progress))

    runner = _TrainingRunner(
        command, args.trainer or "", upload, signals, drain_for if has_store else None
    )
    return runner.run(attempt, prepare_attempt, args.restarts)


@dataclass
class _TrainingRunner:
    """Runs a training, restarts it, and uploads its saves.

    ``drain_for``: seconds to wait at its end until the store has its saves; None without a store.
    """

    command: list[str]
    trainer: str
    upload: Upload
    signals: Signals
    drain_for: float | None
    _served_signals: int = 0

    def run(
        self, attempt: Attempt, prepare_attempt: Callable[[Attempt], Start], restarts: int
    ) -> int:
        """Run the training until it ends well, or has used its restarts; return its exit code.

        A failure counts as one restart if it left a new save, else as two.  Print which saves are
        stored at the end.  Raises the errors of `prepare`.
        """
        used_restarts, failures, newest = 0, 0, self._newest_step() if restarts else -1
        while True:
            current = next_try(attempt, failures) if failures else attempt
            start = prepare_attempt(current)
            note(start.text)
            newest = max(newest, -1 if start.step is None else start.step)
            with self.signals.handled():
                status = self._train(current, start)
                may_restart = bool(status and restarts and not self.signals.is_ending)
                if may_restart:
                    step = self._drain(self.upload.saves.rule.unmarked).newest_step
                    failures, used_restarts = (
                        failures + 1,
                        used_restarts + (1 if step > newest else 2),
                    )
                    newest = max(newest, step)
                    if used_restarts <= restarts and self._pause(
                        failures, f"{used_restarts} of {restarts} used"
                    ):
                        continue
                    note(f"not started again: {used_restarts} of {restarts} restarts would be used")
                self._print_result(self._drain(math.inf))
                return exit_code_of(status)

    def _train(self, attempt: Attempt, start: Start) -> int:
        """Run the training once, beside a worker; return its exit code, or minus a signal."""
        resumed = Resumed(str(start.checkpoint), start.step) if start.checkpoint else None
        command = command_for(self.command, resumed, self.trainer)
        mark: TrainingMark | None = None
        last_check = -math.inf

        def on_poll(pid: int) -> None:
            """Mark the training once its directory has entries, and keep a worker running."""
            nonlocal mark, last_check
            if mark is None and has_entries(self.upload.run.path):
                mark = TrainingMark(self.upload.run.path, attempt.name, pid, began)
                with contextlib.suppress(OSError, CkptsyncError):  # without a mark the files decide
                    mark.begin()
                    self._log(f"attempt {attempt.name} {start.text}")
            if (now := time.monotonic()) - last_check >= _LOOK_EVERY:
                last_check = now
                self._ensure_worker()

        began = time.time()
        status = self.signals.run(command, environment_for(os.environ, resumed), on_poll)
        end = f"the training {describe_end(status)} (attempt {attempt.name})"
        with contextlib.suppress(OSError, CkptsyncError):
            if status == 0 and mark is not None:
                mark.end()
            if mark is not None:
                self._log(end)
        note(end)
        return status

    def _log(self, text: str) -> None:
        """Add a line to the spool's log, whose last lines the worker reports to `status`.

        Raises OSError, CkptsyncError.
        """
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_log(self.upload.run.path / SPOOL, f"{timestamp} resume: {text}")

    def _drain(self, max_wait: float) -> DrainResult:
        """Wait; return the saves once the store has them, or ``drain_for`` or signals end the wait.

        ``max_wait``: passed to `drain`; with infinity a signal ends the wait from the process's
        second on, else any; it must come during the wait.  Without a store return at once.
        """
        if self.drain_for is None:
            return DrainResult(self.upload.saves.read(time.monotonic()))
        deadline, earlier_signals = time.monotonic() + self.drain_for, self.signals.count
        # without a limit, the first signal ends only the training
        needed_signals = 2 if math.isinf(max_wait) else 1

        def is_stopped() -> bool:
            """Return whether signals, the time, or a missing worker end the wait."""
            is_signalled = (
                self.signals.count > earlier_signals and self.signals.count >= needed_signals
            )
            return is_signalled or time.monotonic() >= deadline or self.upload.notice_lost_worker()

        return drain(self.upload.saves, is_stopped, self._ensure_worker, note, max_wait)

    def _ensure_worker(self) -> None:
        """Keep a worker running, also after a signal that has ended it, too."""
        if self.signals.count > self._served_signals:
            self._served_signals = self.signals.count
            embedded_worker.expect_end(self.upload.run.path)
        self.upload.ensure_worker()

    def _newest_step(self) -> int:
        """Return the newest step in the output directory; -1 if there is none, or on an error."""
        try:
            return DrainResult(self.upload.saves.read(time.monotonic())).newest_step
        except CkptsyncError:  # `prepare` will raise it
            return -1

    def _pause(self, failures: int, budget: str) -> bool:
        """Wait before the next restart; return False at once if a signal asks for the end.

        ``failures`` decides for how long (`backoff`); ``budget`` is printed.
        """
        seconds = backoff(failures, FIRST, LONGEST)
        note(f"starting it again in {seconds:.0f} s: {budget}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.signals.is_ending:
            time.sleep(_POLL)
        return not self.signals.is_ending

    def _print_result(self, result: DrainResult) -> None:
        """Print which saves are stored, and stop our own worker if it is not needed."""
        if self.drain_for is None:
            note("no store is named: nothing was uploaded")
            return
        for line in describe(result, self.upload.run, self.upload.url):
            note(line)
        self.upload.finish(result)
