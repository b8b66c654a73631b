"""Scans an output directory again and again: which saves are here, since when, are they finished?

Rotation may delete a checkpoint at any moment, also while the store does not answer.  So a scan
pins what has appeared and judges each save once; planning and sending use that verdict.  Nothing
here reads the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync import checkpoint_dirs
from ckptsync.checkpoint_dirs import CheckpointDir
from ckptsync.errors import CkptsyncError, Incomplete, StoreError
from ckptsync.spool.markers import PinNotes, read_log
from ckptsync.spool.pins import claim, list_pins, write_pin_notes
from ckptsync.walk import SPOOL, Stat
from ckptsync.worker.finished import (
    Judgement,
    Rule,
    is_lost,
    is_stable,
    judge,
    last_file,
    may_be_alone,
)
from ckptsync.worker.local_save import Key, LocalSave
from ckptsync.worker.observation import (
    Observation,
    Surroundings,
    find_surroundings,
    fingerprint,
    is_like_another,
    observe,
    with_surroundings,
)
from ckptsync.worker.options import RunDir, push_command
from ckptsync.worker.pinning import Pinner, step_key
from ckptsync.worker.results import Failure, describe_failure

# seconds without a renewal, on our clock, after which another node's pin on a shared disk is taken
# over
DEAD_AFTER = 600.0
STORED = "stored, or another's"
"""The reason of what the store, or another node, has."""
SELDOM = 0.1  # of the time for which files have stayed the same, their ends are not read again
_HOOK_LINES = 3


@dataclass(frozen=True, slots=True)
class ScannedSave:
    """One save as the last scan saw it.

    ``first``: when it was first seen.  ``since``: since when nothing has changed.  ``state``: the
    stats of its files; the save has changed if they differ.  ``observation``: None if its files
    were not read, because they are changing or nothing is left to do.  ``read_at``: when they were
    read last. Times are the scans' clock.
    """

    local_save: LocalSave
    first: float
    since: float
    state: tuple[Stat, ...]
    verdict: Judgement
    observation: Observation | None = None
    read_at: float = 0.0

    @property
    def key(self) -> Key:
        """Return what names the save on this node."""
        return self.local_save.key

    @property
    def is_lost(self) -> bool:
        """Return whether the trainer has removed it and it can never be known to be complete."""
        return self.observation is not None and is_lost(self.observation)


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of one scan, by run and step.

    ``due``: seconds until a save is finished if nothing changes; None if unknown.  ``notes``: what
    an operator should know, for example that a save was given up to make room.
    """

    saves: tuple[LocalSave, ...] = ()
    failures: tuple[Failure, ...] = ()
    due: float | None = None
    notes: tuple[str, ...] = ()


def write_save_notes(local_save: LocalSave, pin_notes: PinNotes) -> LocalSave:
    """Write notes into a save's pin; return the save with all notes that it has now.

    Raises Incomplete if the pin does not exist any more, StoreError where the disk refuses.
    """
    assert local_save.pin is not None
    return replace(
        local_save, pin=replace(local_save.pin, notes=write_pin_notes(local_save.pin, pin_notes))
    )


class Scanner:
    """Scans one output directory, and remembers each save between scans.

    Any thread may call `scan`, which runs once at a time; the rest may be called meanwhile.
    ``lock`` is held while pins change, and never while the store, or a checkpoint's bytes, are
    waited for.

    Args:
        run: the output directory.
        pinner: pins what appears.
        rule: how long a save must be unchanged.
        is_done: whether the store has a save, or another node sends it.
        has_other_part: whether another node has stored its part of a save.
        is_planned: whether a plan has seen a save finished, with these files.
        store: the store's URL, for advice.

    """

    def __init__(
        self,
        run: RunDir,
        pinner: Pinner,
        rule: Rule,
        is_done: Callable[[LocalSave], bool] = lambda _: False,
        has_other_part: Callable[[LocalSave], bool] = lambda _: False,
        *,
        is_planned: Callable[[ScannedSave], bool] = lambda _: False,
        store: str = "",
    ) -> None:
        """Begin without saves; scan nothing yet."""
        self.lock = threading.Lock()
        self.last: Scan | None = None
        self._store = store
        self._run, self._pinner, self._rule = run, pinner, rule
        self._is_done, self._has_other_part, self._is_planned = is_done, has_other_part, is_planned
        self._saves: dict[Key, ScannedSave] = {}
        self._at = 0.0
        self._renewals: dict[tuple[Path, int], float] = {}
        # weights that no worker knows: since when they have been like this, and why
        self._strays: dict[str, tuple[float, object, str]] = {}
        self._strays_at = float("-inf")
        # the directory's identity, and the checkpoints that the last scan saw in it
        self._names: tuple[tuple[int, int], frozenset[str]] | None = None

    def scan(self, now: float) -> Scan:
        """Pin what has appeared, judge every save, and return the result, also kept in `last`.

        Writes verdicts beside the pins, and takes over pins of dead nodes.  Waits for a scan of
        another thread, and then goes by the later of the two times.  ``now``: seconds on a clock
        that only grows.  What cannot be read is in `Scan.failures`.  A note names each save that
        waiting alone does not finish, once it has not changed for ``rule.unmarked`` seconds.
        """
        with self.lock:
            # a thread that had to wait for another scan knew the time before that
            now = max(now, self._at)
            scanned_saves, result = self._scan_run(now)
            self._saves, self._at = {scanned.key: scanned for scanned in scanned_saves}, now
            renewals = {
                (scanned.local_save.pin.path, scanned.local_save.pin.renewed)
                for scanned in self._saves.values()
                if scanned.local_save.pin is not None
            }
            self._renewals = {
                key: since for key, since in self._renewals.items() if key in renewals
            }
        notes = list(result.notes)
        for scanned in scanned_saves:
            # nobody writes to it, and no waiting makes it good, or only hours do: the trainer was
            # killed, or a user has to decide
            is_blocked = (
                scanned.observation
                and scanned.observation.files
                and (scanned.verdict.remaining is None or scanned.observation.unended)
                and not scanned.verdict.finished
                and not scanned.is_lost
            )
            if is_blocked and now - scanned.since >= self._rule.unmarked:
                reason = scanned.verdict.reason.partition("; finished if")[0]
                name = f"{scanned.local_save.run}/{scanned.local_save.checkpoint}"
                notes.append(f"{name}: not uploaded: {reason}")
        notes += self._stray_notes(now)
        local_saves = tuple(scanned.local_save for scanned in scanned_saves)
        self.last = Scan(local_saves, result.failures, self.due(now), tuple(notes))
        return self.last

    def _stray_notes(self, now: float) -> Iterator[str]:
        """Yield a note of weights that no worker recognizes as a checkpoint, one for each reason.

        Weights are named after they have not changed for ``rule.unmarked`` seconds: they may become
        a checkpoint.  The directory is searched once in that time; between, the last result counts.
        If it cannot be read, there are no notes.
        """
        quiet_time = self._rule.unmarked
        if now - self._strays_at >= quiet_time:
            self._strays_at = now
            try:
                strays = checkpoint_dirs.find_strays(self._run.path)
            except CkptsyncError:  # the scan says what cannot be read
                strays = {}
            before, self._strays = self._strays, {}
            for name, weights_name in strays.items():
                path = self._run.path / name
                state = _identity(path), _size_and_mtime(path), _size_and_mtime(path / weights_name)
                since, last, why = before.get(name, (now, None, ""))
                if state != last:
                    since, why = now, _why_stray(path, weights_name)
                self._strays[name] = since, state, why
        by_reason: dict[str, list[str]] = {}
        for name, (since, _, why) in self._strays.items():
            if self._strays_at - since >= quiet_time:
                by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            first = self._run.path / names[0]
            todo = ""
            if why == _UNKNOWN:
                todo = f"; to upload one as it is: {push_command(first, self._store, whole=True)}"
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            listed = ", ".join(names[:3]) + more
            yield f"{self._run.name}: not uploaded: {listed} in {self._run.path}: {why}{todo}"

    def saves(self) -> tuple[ScannedSave, ...]:
        """Return the saves of the last scan, oldest first."""
        return tuple(self._saves.values())

    def latest(self, key: Key) -> ScannedSave | None:
        """Return a save as the last scan saw it; None if it is not here any more."""
        return self._saves.get(key)

    @property
    def judged_at(self) -> float:
        """Return when the last scan was, on its caller's clock."""
        return self._at

    def due(self, now: float) -> float | None:
        """Return the seconds until a save is finished that no plan has seen finished yet.

        0 if one is finished already.  For a save that waiting alone does not finish: until its
        files are read again.  None if no save waits, or a plan has seen them all.
        """
        waits: list[float] = []
        for scanned in self.saves():
            remaining = scanned.verdict.remaining
            if scanned.observation is None or (
                scanned.verdict.finished and self._is_planned(scanned)
            ):
                continue
            if scanned.verdict.finished:
                return 0.0
            # what is refused now may be whole soon; what a crash has left never is
            if remaining is None:
                remaining = max(self._rule.quiet, (self._at - scanned.since) * SELDOM)
            waits.append(max(0.0, remaining - (now - self._at)))
        return min(waits, default=None)

    def _scan_run(self, now: float) -> tuple[list[ScannedSave], Scan]:
        """Return the output directory's saves, judged, and the scan's failures and notes.

        Pins what has appeared, and takes over pins of other nodes whose owner shows no sign of life
        for ten minutes.  Remembers the names for the next scan.  A save that cannot be judged is
        among the failures only.  If the directory or its spool cannot be read, there are no saves
        and one failure.
        """
        run = self._run
        identity, names_before, self._names = _identity(run.path), self._names, None
        try:
            unjudged = list_and_pin_saves(run, self._pinner)
            pins = [local_save.pin for local_save in unjudged.saves if local_save.pin is not None]
            around = find_surroundings(
                run.path,
                unjudged.saves,
                {p.checkpoint for p in pins if not (p.stored or p.is_committed)},
            )
        except CkptsyncError as e:
            return [], Scan(failures=(describe_failure(run.name, "", e),))
        # another directory may have been mounted, or moved, to its place: then nobody knows which
        # checkpoints were there before
        earlier_names = names_before[1] if names_before and names_before[0] == identity else None
        failures = list(unjudged.failures)
        scanned_saves: list[ScannedSave] = []
        for local_save in unjudged.saves:
            try:
                pin = local_save.pin
                # on a shared disk: whose owner may be dead
                if pin is not None and pin.node not in ("", self._pinner.node):
                    since = self._renewals.setdefault((pin.path, pin.renewed), now)
                    claimed = claim(pin, self._pinner.node) if now - since > DEAD_AFTER else None
                    local_save = local_save if claimed is None else replace(local_save, pin=claimed)  # noqa: PLW2901
                is_new = earlier_names is not None and local_save.checkpoint not in earlier_names
                scanned_saves.append(
                    self._scan_save(local_save, around, now, failures, is_new=is_new)
                )
            except CkptsyncError as e:  # noqa: PERF203 - one that cannot be read hides no other
                failures.append(describe_failure(run.name, local_save.checkpoint, e))
        if identity:
            names = {s.checkpoint for s in unjudged.saves} | {f.checkpoint for f in failures}
            self._names = identity, frozenset(names)
        return scanned_saves, replace(unjudged, failures=tuple(failures))

    def _scan_save(
        self,
        local_save: LocalSave,
        around: Surroundings,
        now: float,
        failures: list[Failure],
        *,
        is_new: bool,
    ) -> ScannedSave:
        """Return one save with its verdict, and note the verdict beside its pin.

        A save that is done is not read, and gets the verdict `STORED`.  An Incomplete of files that
        change meanwhile becomes the verdict's reason; other errors are raised.  What a full disk
        refuses to note is added to ``failures``.  ``is_new``: the last scan saw no checkpoint of
        this name.
        """
        before = self._saves.get(local_save.key)
        # a pinned file is ours to replace, by a reflink of it: its inode says nothing
        stats = (
            Stat(file.stat.path, file.stat.size, file.stat.mtime, 0, 0)
            if file.is_pinned
            else file.stat
            for file in local_save.files.by_path.values()
        )
        state = tuple(sorted((*stats, *local_save.files.partial)))
        is_same = before is not None and before.state == state
        since = before.since if before is not None and is_same else now
        first = before.first if before is not None else now
        stored = Judgement(finished=False, reason=STORED, remaining=None)
        scanned = ScannedSave(local_save, first, since, state, stored)
        if self._is_done(local_save):
            return scanned
        is_new_save = self._is_new_save(local_save, before, since, is_new=is_new)
        try:
            observation, verdict, read_at = self._judge(
                local_save,
                before if is_same else None,
                around,
                now - since,
                now,
                is_new_save=is_new_save,
            )
        except Incomplete as e:  # it changes meanwhile
            return replace(
                scanned, verdict=Judgement(finished=False, reason=str(e), remaining=None)
            )
        stable = is_stable(observation, now - since, self._rule, verdict)
        local_save = _note_verdict(local_save, verdict, failures, is_stable=stable)
        return replace(
            scanned,
            local_save=local_save,
            verdict=verdict,
            observation=observation,
            read_at=read_at,
        )

    def _judge(
        self,
        local_save: LocalSave,
        same: ScannedSave | None,
        around: Surroundings,
        unchanged_for: float,
        now: float,
        *,
        is_new_save: bool,
    ) -> tuple[Observation, Judgement, float]:
        """Return an observation, its verdict, and when the files were read for it.

        Files of a save that was finished before are not read again; files that stay the same, ever
        more seldom, and once more before they are called finished.  ``same``: the last scan's save,
        if no file has changed since.  Raises Incomplete if files vanish meanwhile.
        """
        other_part = self._has_other_part(local_save)

        def judge_now(observation: Observation) -> tuple[Observation, Judgement]:
            """Return the observation, with ``has_similar`` if that decides, and its verdict."""
            if may_be_alone(observation, self._rule):  # then other checkpoints decide
                observation = replace(
                    observation, has_similar=is_like_another(local_save, around.saves)
                )
            return observation, judge(observation, unchanged_for, self._rule)

        if (
            same
            and same.observation
            and (same.verdict.finished or now - same.read_at < SELDOM * unchanged_for)
        ):
            observation, verdict = judge_now(
                with_surroundings(same.observation, local_save, around, other_part=other_part)
            )
            if same.verdict.finished or not verdict.finished:
                return observation, verdict, same.read_at
        return (
            *judge_now(observe(local_save, around, other_part=other_part, is_new=is_new_save)),
            now,
        )

    def _is_new_save(
        self, local_save: LocalSave, before: ScannedSave | None, since: float, *, is_new: bool
    ) -> bool:
        """Return whether a save appeared between two scans and no other save was begun in it since.

        For a save that was not ``before``: whether it ``is_new``, has no pin number above 0, and
        was not moved in.  A new save that changes stays new unless it was finished, had been
        unchanged for ``rule.unmarked`` seconds, or a file was written over when its last file was
        there.
        """
        if before is None:
            return is_new and local_save.k == 0 and not _was_moved_in(local_save)
        if before.observation is None or not before.observation.is_new or before.since == since:
            return before.observation is not None and before.observation.is_new
        has_rested = since - before.since >= self._rule.unmarked
        now = {f.path: (f.size, f.mtime) for f in local_save.files.stats}
        is_rewritten = any(
            now.get(f.path, (f.size, f.mtime)) != (f.size, f.mtime)
            for f in before.observation.files
        )
        has_last_file = is_rewritten and bool(last_file(before.observation))
        return not (before.verdict.finished or has_rested or has_last_file)


def list_and_pin_saves(run: RunDir, pinner: Pinner) -> Scan:
    """Pin what has appeared in an output directory; return every save that is here, not yet judged.

    Saves come by step.  Drops pins if the spool is full; with ``spool_full`` ``wait`` it creates
    none while pins that may be dropped do not make enough room.  Starts the thread that copies
    files, unless the spool is full.  An error of one checkpoint becomes a failure.  Raises
    ConfigError, StoreError or Incomplete if the directory cannot be read at all.
    """
    dirs_by_name = {s.name: s for s in checkpoint_dirs.find_checkpoint_dirs(run.path)}
    pins = list_pins(run.path)
    failures: list[Failure] = []
    relief = pinner.make_room(run, dirs_by_name, pins, failures)
    is_full = bool(relief.full) and pinner.rule.full == "wait"
    local_saves: list[LocalSave] = []
    for name in sorted({*dirs_by_name, *(p.checkpoint for p in pins)}, key=step_key):
        checkpoint_dir = dirs_by_name.get(name) or CheckpointDir(
            name, checkpoint_dirs.family_of(name), run.path / name
        )
        remaining_pins = [p for p in pins if p.checkpoint == name and p not in relief.drop]
        try:
            local_saves += pinner.pin(
                run, checkpoint_dir, remaining_pins, failures, is_full=is_full
            )
        except CkptsyncError as e:
            failures.append(describe_failure(run.name, name, e))
    pinner.copies.close_dropped()
    if not relief.full:
        pinner.copies.begin()
    notes = (
        *pinner.lost,
        *filter(None, [relief.full]),
        *pinner.copies.problems(),
        *read_log(run.path / SPOOL)[-_HOOK_LINES:],
    )
    return Scan(tuple(local_saves), tuple(failures), notes=notes)


_UNKNOWN = "weights, in no checkpoint that a worker knows"


def _why_stray(path: Path, weights_name: str) -> str:
    """Return why the weights at ``path`` are not uploaded.

    ``path``: a file or directory of the output directory.  ``weights_name``: one of its files with
    weights, or the file's own name.  Reads directories.
    """
    if path.name == weights_name and not path.is_dir():
        return "a format that a worker does not know; `ckptsync push --as` uploads a directory"
    with contextlib.suppress(CkptsyncError):  # a push says what cannot be read
        if checkpoint_dirs.find_checkpoint_dirs(path):
            return "an output directory in this one: name it in worker.runs"
    return _UNKNOWN


def _size_and_mtime(path: Path) -> tuple[int, int]:
    """Return a file's size and mtime (ns); zeros if it cannot be seen."""
    try:
        info = path.stat()
    except OSError:  # a directory whose file is not shown by itself, or it has gone
        return 0, 0
    return info.st_size, info.st_mtime_ns


def _note_verdict(
    local_save: LocalSave, verdict: Judgement, failures: list[Failure], *, is_stable: bool
) -> LocalSave:
    """Write into the pin that the save is stable, and when it was finished; return the save.

    ``stable`` counts once rotation has removed files; ``finished`` is for the manifest.  Without a
    pin, or with nothing new to note, the save stays as it is.  What a full disk refuses is added to
    ``failures``.  Raises Incomplete if the pin does not exist any more.
    """
    if local_save.pin is None:
        return local_save
    pin_notes = local_save.pin.notes
    stable = fingerprint(local_save.files.stats) if is_stable else 0
    finished = time.time_ns() if verdict.finished and not pin_notes.finished else 0
    if stable in (0, pin_notes.stable) and not finished:
        return local_save
    try:
        return write_save_notes(local_save, PinNotes(stable=stable, finished=finished))
    except StoreError as e:  # a full disk: it is sent all the same, and its manifest says less
        failures.append(describe_failure(local_save.run, local_save.checkpoint, e))
        return local_save


def _was_moved_in(local_save: LocalSave) -> bool:
    """Return whether a save's directory was renamed with all that is in it, by its ctime.

    A rename changes the ctime alone; a new name in the directory changes both times.
    """
    if local_save.checkpoint_dir.only is not None:
        return False
    try:
        info = local_save.checkpoint_dir.path.stat()
    except OSError:  # rotation: what was there came and went since the last scan
        return False
    return info.st_ctime_ns > info.st_mtime_ns


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return a directory's device and inode; None if it cannot be read."""
    try:
        info = directory.stat()
    except OSError:  # not there, or not to be seen: the scan says why
        return None
    return info.st_dev, info.st_ino
