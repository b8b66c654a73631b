"""What of an output directory the store has, and the wait until it has all that is whole.

Whoever uploads: a worker.  This only looks, at the files and at the store's records, and judges as
the worker does.  A training that `resume` started is known to have ended; its `TrainingMark` says
so to both.
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
_PROCESS = "resume-"  # begins the names of marks


@dataclass(frozen=True, slots=True)
class DrainedSave:
    """One save of an output directory.

    ``stored``: the store has these files, or gave them up; ``unsent``: whole, and not uploaded yet;
    ``waiting``: not known to be whole for ``left`` more seconds; ``refused``: torn, aside, perhaps
    not the final model, or damaged in the store, where no waiting helps.  ``still``: seconds for
    which nothing has changed, as far as this process saw it.  ``path``: what to push.
    """

    checkpoint: str
    step: int | None
    status: SaveStatus
    reason: str = ""
    location: str = ""
    left: float = 0.0
    still: float = 0.0
    path: Path = Path()


@dataclass(frozen=True, slots=True)
class DrainResult:
    """All saves of an output directory.  ``error``: why the store could not be read, if so."""

    saves: tuple[DrainedSave, ...] = ()
    error: str = ""

    @property
    def is_stored(self) -> bool:
        """Return whether the store has all, so that this machine may be shut down."""
        return not self.error and not self.unstored

    @property
    def unstored(self) -> tuple[DrainedSave, ...]:
        """Return the saves that the store does not have."""
        return tuple(save for save in self.saves if save.status != "stored")

    @property
    def newest_step(self) -> int:
        """Return the newest step that is stored, or whole; -1 without any."""
        whole = (s.step for s in self.saves if s.status in ("stored", "unsent"))
        return max((step for step in whole if step is not None), default=-1)


def is_over(result: DrainResult, rule: Rule, longest: float) -> bool:
    """Return whether nothing is left that waiting brings into the store.

    A torn save counts once nothing has changed for as long as a finished one needs.  ``longest``:
    seconds that a save may need until it is known to be whole, to be waited for.
    """
    return not result.error and all(
        save.still >= rule.quiet if save.status == "refused" else save.left > longest
        for save in result.unstored
    )


class OutputDirSaves:
    """The saves of an output directory, as this process saw them before and sees them now.

    ``nodes``: the ids under which workers of this machine pin.
    """

    def __init__(self, run: RunDir, nodes: Collection[str], view: StoreView, rule: Rule) -> None:
        self.run, self.rule = run, rule
        self._nodes, self._view = nodes, view
        self._since: dict[tuple[str, int], tuple[tuple[Stat, ...], float]] = {}

    def read(self, now: float) -> tuple[DrainedSave, ...]:
        """Return each save.  ``now``: seconds of a clock that only grows.

        Raises CkptsyncError where the directory or the store cannot be read.
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
        drained = (self._drained(save, around, now) for save in saves)
        aside = self._read_aside(path)
        return (*(save for save in drained if save is not None), *aside)

    def _read_aside(self, output_dir: Path) -> list[DrainedSave]:
        """Return what was moved aside and is not in the store, as far as files and names tell."""
        reason = "moved aside by an earlier start, and not uploaded"
        home = output_dir / checkpoint_dirs.ASIDE
        return [
            DrainedSave(
                f"{home.name}/{name}", None, "refused", reason, still=math.inf, path=home / name
            )
            for name, (checkpoint, files) in checkpoint_dirs.list_aside(output_dir).items()
            if self._view.find_save(files, checkpoint, self._view.selection) is None
        ]

    def _drained(self, seen: LocalSave, around: Surroundings, now: float) -> DrainedSave | None:
        """Return where a save stands; None for one that is none, or that nobody can complete."""
        where = seen.checkpoint_dir
        path = where.path / where.only[0] if where.only and len(where.only) == 1 else where.path
        save = DrainedSave(seen.checkpoint, where.step, "stored", path=path)
        manifest = self._view.find_save(seen.files.stats, seen.checkpoint, self._view.selection)
        if manifest is not None and self._view.known.is_damaged(manifest.location):
            command = f"`ckptsync repair {self.run.name}/{manifest.location}`"
            return replace(
                save,
                status="refused",
                reason=f"damaged in the store; this disk may have the good bytes: {command}",
                location=manifest.location,
                still=now - self._unchanged_since(seen, now),
            )
        if manifest is not None:
            return replace(save, location=manifest.location)
        if seen.pin is not None and seen.pin.stored:
            return save  # the worker has read that another node's files there are the same
        if self._view.is_given_up(seen, self._view.selection):
            return replace(save, reason="given up in the store")
        still = now - self._unchanged_since(seen, now)
        try:
            observed = observe(seen, around, other_part=self._view.has_other_part(seen))
        except Incomplete as e:
            return replace(save, status="waiting", reason=str(e))
        if may_be_alone(observed, self.rule):
            observed = replace(observed, alike=is_like_another(seen, around.saves))
        verdict = judge(observed, still, self.rule)
        is_copy = observed.unended is not None and observed.unended.is_followed
        if is_lost(observed) or (is_copy and not verdict.finished):
            return None  # what rotation left, or a copy in the middle of training
        if verdict.finished:
            return replace(save, status="unsent", reason="not uploaded yet", still=still)
        reason = verdict.reason.partition("; finished if")[0]
        # what is perhaps not the final model is judged anew after hours
        if verdict.left is None or observed.unended is not None:
            return replace(save, status="refused", reason=reason, still=still)
        return replace(save, status="waiting", reason=reason, left=verdict.left, still=still)

    def _unchanged_since(self, seen: LocalSave, now: float) -> float:
        key, state = (seen.checkpoint, seen.k), (*seen.files.stats, *seen.files.partial)
        if self._since.get(key, ((), 0.0))[0] != state:
            self._since[key] = state, now
        return self._since[key][1]


def drain(
    saves: OutputDirSaves,
    is_stopped: Callable[[], bool],
    serve: Callable[[], None],
    say: Callable[[str], None],
    longest: float,
) -> DrainResult:
    """Wait until the store has all that is whole, or until ``is_stopped``; return what it has.

    ``serve`` is called again and again: it sees to it that a worker is at work.  ``longest``: see
    `is_over`.
    """
    result, waited_for = DrainResult(), ""
    while True:
        serve()
        try:
            result = DrainResult(saves.read(time.monotonic()))
        except CkptsyncError as e:  # the store may come back
            result = replace(result, error=str(e))
        if is_over(result, saves.rule, longest) or is_stopped():
            return result
        unstored = ", ".join(save.checkpoint for save in result.unstored)
        if (text := result.error or unstored) != waited_for:
            waited_for = text
            say(f"waiting until the store has what was saved: {text}")
        time.sleep(_POLL)


def describe(result: DrainResult, run: RunDir, url: str) -> list[str]:
    """Return what is stored, what is not and why, and whether the machine may be shut down."""
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
    return push_command(directory, "--store", url, "--run", run.name)


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))[-12:]
    more = len(dict.fromkeys(names)) - len(shown)
    return ", ".join(shown) + (f" and {more} older ones" if more else "")


class TrainingMark:
    """What tells the worker whether a training that `resume` started still runs.

    A final model, which no trainer marks, is finished once its training has ended well.  ``at``:
    seconds since the epoch when it began.
    """

    def __init__(self, output_dir: Path, training: str, pid: int, at: float) -> None:
        self._spool, self._process = output_dir / SPOOL, f"{_PROCESS}{os.getpid()}-{pid}"
        self._mark = markers.Begun(
            train=training,
            rank=0,
            world=1,
            local_world=0,
            host=socket.gethostname(),
            pid=pid,
            began=markers.began(pid),
            boot=markers.boot(),
            at=at,
            machine=markers.machine(),
            marks="some",
        )

    def begin(self) -> None:
        """Write that it runs, and remove the marks of those that have ended.  Raises OSError."""
        for mark in markers.begun(self._spool):
            if mark.process.startswith(_PROCESS) and markers.is_training(mark) is False:
                safe_files.unlink(markers.begun_path(self._spool, mark.process))
        markers.write_mark(markers.begun_path(self._spool, self._process), self._mark)

    def end(self) -> None:
        """Write that it has ended well.  Raises OSError."""
        now = time.time()
        mark = replace(self._mark, ended=now, left=now)
        markers.write_mark(markers.begun_path(self._spool, self._process), mark)
