"""Say which saves of an output directory the store has, and wait until it has all that are whole.

A machine may be shut down only when nothing is left on it that is not in the store.  A worker
uploads; this module only reads the files and the store's records, and judges saves as the worker
does.  `TrainingMark` tells both that a training, which `resume` started, has ended.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptsync import checkpoint_dirs
from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.spool import markers, safe_files
from ckptsync.spool.pins import list_pins
from ckptsync.walk import SPOOL, Stat
from ckptsync.worker.finished import Rule, is_lost, judge, may_be_alone
from ckptsync.worker.local_save import LocalSave
from ckptsync.worker.observation import (
    Surroundings,
    find_surroundings,
    is_like_another,
    observe,
)
from ckptsync.worker.options import RunDir, push_command
from ckptsync.worker.push import Offer, offered_saves
from ckptsync.worker.store_view import StoreView

SaveStatus = Literal["stored", "unsent", "waiting", "refused"]
_POLL = 1.0  # seconds
_PROCESS = "resume-"  # prefix of the marks' names


@dataclass(frozen=True, slots=True)
class DrainedSave:
    """One save of an output directory, and whether the store has it.

    ``status`` is one of:

    - stored: the store has these files, or has given them up;
    - unsent: the save is whole, and not uploaded yet;
    - waiting: it is known to be whole in ``wait_left`` seconds at the earliest;
    - refused: waiting does not help: it is torn, was moved aside, is perhaps not the final model,
      or is damaged in the store.

    ``unchanged_for``: seconds since this process last saw a change of its files.  ``path``: the
    argument for `ckptsync push`.
    """

    checkpoint: str
    step: int | None
    status: SaveStatus
    reason: str = ""
    location: str = ""
    wait_left: float = 0.0
    unchanged_for: float = 0.0
    path: Path = Path()


@dataclass(frozen=True, slots=True)
class DrainResult:
    """All saves of an output directory.  ``error``: why the store could not be read, else empty."""

    saves: tuple[DrainedSave, ...] = ()
    error: str = ""

    @property
    def is_stored(self) -> bool:
        """Return whether this machine may be shut down: every save has the status "stored".

        False if the store could not be read.
        """
        return not self.error and not self.unstored

    @property
    def unstored(self) -> tuple[DrainedSave, ...]:
        """Return the saves with another status than "stored"."""
        return tuple(save for save in self.saves if save.status != "stored")

    @property
    def newest_step(self) -> int:
        """Return the greatest step of a save that is stored or whole; -1 if there is none."""
        whole = (s.step for s in self.saves if s.status in ("stored", "unsent"))
        return max((step for step in whole if step is not None), default=-1)


def is_over(result: DrainResult, rule: Rule, max_wait: float) -> bool:
    """Return whether waiting would bring no further save into the store.

    False while the store cannot be read, or a save is unsent.  A refused save is waited for only
    until its files have not changed for ``rule.quiet`` seconds.  A waiting one is waited for unless
    that takes more than ``max_wait`` seconds.
    """
    return not result.error and all(
        save.unchanged_for >= rule.quiet if save.status == "refused" else save.wait_left > max_wait
        for save in result.unstored
    )


class OutputDirSaves:
    """Reads the saves of an output directory, and remembers since when each has not changed.

    ``nodes``: the ids under which workers of this machine pin.
    """

    def __init__(self, run: RunDir, nodes: Collection[str], view: StoreView, rule: Rule) -> None:
        """Keep the arguments; read nothing."""
        self.run, self.rule = run, rule
        self._nodes, self._view = nodes, view
        self._since: dict[tuple[str, int], tuple[tuple[Stat, ...], float]] = {}

    def read(self, now: float) -> tuple[DrainedSave, ...]:
        """Read the directory, refresh the store view, and return each save; () without a directory.

        Those that were moved aside come last.  Remnants of rotation and unfinished copies are left
        out. Notes since when each save has not changed.  ``now``: seconds of a monotonic clock.
        Raises CkptsyncError if the directory or the store cannot be read.
        """
        path = self.run.path
        if not path.is_dir():
            return ()
        offer = Offer(
            self.run.name, path, checkpoint_dirs.find_checkpoint_dirs(path), list_pins(path)
        )
        saves = [save for save in offered_saves(offer, *self._nodes) if save.files.by_path]
        self._view.refresh()
        around = find_surroundings(path, saves, {save.checkpoint for save in saves})
        judged = (self._judge(save, around, now) for save in saves)
        aside = self._read_aside(path)
        return (*(save for save in judged if save is not None), *aside)

    def _read_aside(self, output_dir: Path) -> list[DrainedSave]:
        """Return the saves that were moved aside and are not in the store, by files and names."""
        reason = "moved aside by an earlier start, and not uploaded"
        aside = output_dir / checkpoint_dirs.ASIDE
        return [
            DrainedSave(
                f"{aside.name}/{name}",
                None,
                "refused",
                reason,
                unchanged_for=math.inf,
                path=aside / name,
            )
            for name, (checkpoint, files) in checkpoint_dirs.list_aside(output_dir).items()
            if self._view.find_save(files, checkpoint, self._view.selection) is None
        ]

    def _judge(self, local: LocalSave, around: Surroundings, now: float) -> DrainedSave | None:
        """Return a save with its status; None for a remnant of rotation, or an unfinished copy.

        A save that the store has is refused if it is damaged there, else stored.  So is one that a
        worker marked as stored, or that was given up.  Others are judged by the worker's rules:
        finished ones are unsent, files that vanish meanwhile mean waiting.  Notes since when the
        save has not changed, unless it is stored.
        """
        directory = local.checkpoint_dir
        path = (
            directory.path / directory.only[0]
            if directory.only and len(directory.only) == 1
            else directory.path
        )
        save = DrainedSave(local.checkpoint, directory.step, "stored", path=path)
        manifest = self._view.find_save(local.files.stats, local.checkpoint, self._view.selection)
        if manifest is not None and self._view.run_records.is_damaged(manifest.location):
            command = f"`ckptsync repair {self.run.name}/{manifest.location}`"
            return replace(
                save,
                status="refused",
                reason=f"damaged in the store; this disk may have the good bytes: {command}",
                location=manifest.location,
                unchanged_for=now - self._unchanged_since(local, now),
            )
        if manifest is not None:
            return replace(save, location=manifest.location)
        if local.pin is not None and local.pin.stored:
            return save  # the worker has read that another node's files there are the same
        if self._view.is_given_up(local, self._view.selection):
            return replace(save, reason="given up in the store")
        unchanged_for = now - self._unchanged_since(local, now)
        try:
            observed = observe(local, around, other_part=self._view.has_other_part(local))
        except Incomplete as e:
            return replace(save, status="waiting", reason=str(e))
        if may_be_alone(observed, self.rule):
            observed = replace(observed, has_similar=is_like_another(local, around.saves))
        verdict = judge(observed, unchanged_for, self.rule)
        is_copy = observed.unended is not None and observed.unended.is_followed
        if is_lost(observed) or (is_copy and not verdict.finished):
            return None  # what rotation left, or a copy in the middle of training
        if verdict.finished:
            return replace(
                save, status="unsent", reason="not uploaded yet", unchanged_for=unchanged_for
            )
        reason = verdict.reason.partition("; finished if")[0]
        # what is perhaps not the final model is judged anew after hours
        if verdict.remaining is None or observed.unended is not None:
            return replace(save, status="refused", reason=reason, unchanged_for=unchanged_for)
        return replace(
            save,
            status="waiting",
            reason=reason,
            wait_left=verdict.remaining,
            unchanged_for=unchanged_for,
        )

    def _unchanged_since(self, local: LocalSave, now: float) -> float:
        """Return since when, on ``now``'s clock, a save has not changed; note a change."""
        key, state = (local.checkpoint, local.k), (*local.files.stats, *local.files.partial)
        if self._since.get(key, ((), 0.0))[0] != state:
            self._since[key] = state, now
        return self._since[key][1]


def drain(
    saves: OutputDirSaves,
    is_stopped: Callable[[], bool],
    ensure_worker: Callable[[], None],
    report: Callable[[str], None],
    max_wait: float,
) -> DrainResult:
    """Return the saves once the store has all that are whole, or once ``is_stopped`` is true.

    An error of the store does not end the wait: the result has the latest one.

    Args:
        saves: reads the output directory, once a second.
        is_stopped: is asked after each reading.
        ensure_worker: is called before each reading; it starts a worker if none runs.
        report: gets a sentence whenever what is waited for changes.
        max_wait: see `is_over`.

    """
    result, reported = DrainResult(), ""
    while True:
        ensure_worker()
        try:
            result = DrainResult(saves.read(time.monotonic()))
        except CkptsyncError as e:  # the store may come back
            result = replace(result, error=str(e))
        if is_over(result, saves.rule, max_wait) or is_stopped():
            return result
        unstored = ", ".join(save.checkpoint for save in result.unstored)
        if (text := result.error or unstored) != reported:
            reported = text
            report(f"waiting until the store has what was saved: {text}")
        time.sleep(_POLL)


def describe(result: DrainResult, run: RunDir, url: str) -> list[str]:
    """Return lines for people: what is stored, what is not and why, and the next command."""
    stored = [save.checkpoint for save in result.saves if save.status == "stored"]
    lines = []
    if stored or not result.error:
        lines.append(f"stored: {_listed(stored)}" if stored else "stored: nothing")
    for save in result.unstored:
        lines.append(f"not stored: {save.checkpoint}: {save.reason}")
        if save.status == "refused" and not save.location:
            lines.append(f"  if it is whole all the same: {_push(save.path, url, run)}")
    if result.error:
        lines.append(f"the store cannot be read: {result.error}")
    if result.is_stored and not result.saves:
        where = "no checkpoint is there" if run.path.is_dir() else "no such directory"
        lines.append(f"{run.path}: {where}; if a training saved one, it was somewhere else")
    elif result.is_stored:
        lines.append("all that was saved here is stored; this machine may be shut down")
    elif not result.error and all(save.status == "refused" for save in result.unstored):
        lines.append(
            "all that is whole and in its place is stored;"
            " what is not stored is on this machine only"
        )
    else:
        lines.append(
            "do not shut this machine down: what is not stored is on it only;"
            f" to upload it: {_push(run.path, url, run)}"
        )
    return lines


def _push(directory: Path, url: str, run: RunDir) -> str:
    """Return the `ckptsync push` command that uploads a directory into the run."""
    return push_command(directory, "--store", url, "--run", run.name)


def _listed(names: Sequence[str]) -> str:
    """Return the last 12 different names with commas, and how many precede them."""
    shown = list(dict.fromkeys(names))[-12:]
    hidden = len(dict.fromkeys(names)) - len(shown)
    return ", ".join(shown) + (f" and {hidden} older ones" if hidden else "")


class TrainingMark:
    """A file in the spool that tells the worker whether a training of `resume` still runs.

    No trainer marks its final model, so the worker calls it finished once the training has ended
    well.
    """

    def __init__(self, output_dir: Path, training: str, pid: int, began_at: float) -> None:
        """Keep what the mark says; nothing is written.  ``began_at``: seconds since the epoch."""
        self._spool, self._process = output_dir / SPOOL, f"{_PROCESS}{os.getpid()}-{pid}"
        self._mark = markers.TrainingProcess(
            train=training,
            rank=0,
            world=1,
            local_world=0,
            host=socket.gethostname(),
            pid=pid,
            began=markers.start_time(pid),
            boot=markers.boot_id(),
            at=began_at,
            machine=markers.machine_id(),
            marks="some",
        )

    def begin(self) -> None:
        """Write that the training runs, and remove marks of ended trainings.  Raises OSError."""
        for mark in markers.list_training_processes(self._spool):
            if mark.process.startswith(_PROCESS) and markers.is_training(mark) is False:
                safe_files.unlink(markers.process_path(self._spool, mark.process))
        markers.write_mark(markers.process_path(self._spool, self._process), self._mark)

    def end(self) -> None:
        """Write that the training has ended well.  Raises OSError."""
        now = time.time()
        mark = replace(self._mark, ended=now, left=now)
        markers.write_mark(markers.process_path(self._spool, self._process), mark)
