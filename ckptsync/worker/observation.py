"""What one scan found of a save: its files, the hook's markers, and the checkpoints beside it.

Deciding whether a save is finished must be testable without a disk.  So this module reads the facts
from the file system into one value, an `Observation`, and decides nothing; `worker.finished` judges
the value.  Times of markers and files are compared, which is fair on one machine.  Where clocks
differ, or one was set, a marker proves less, and the files are judged as they are without a hook.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal

from ckptsync.checkpoint_dirs import FINAL, CheckpointDir, Family
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.layouts import registry
from ckptsync.mounts import device_kinds
from ckptsync.plain_json import parse
from ckptsync.spool import markers as spool_markers
from ckptsync.spool.markers import RankMark, TrainingProcess, is_training
from ckptsync.tensors import read_whole
from ckptsync.walk import SPOOL, Stat, open_checkpoint_file
from ckptsync.worker.local_save import LocalFiles, LocalSave, OpenLocalFile, open_each
from ckptsync.worker.torn_saves import TRAINER_STATE

# the file beside the checkpoints into which the process that leads a training writes the last
# step that is saved: verl's, Megatron's, slime's and Megatron-Bridge's; SkyRL's
TRACKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_TRACKED: Collection[Family] = ("verl", "dcp")
COPIED = 60.0  # seconds after a save within which the Trainer begins to copy it for the hub
# Where a refused lease means that somebody writes.  NFS and FUSE refuse leases for reasons of their
# own.
_LEASE_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "zfs", "bcachefs"}
)

HookStatus = Literal["", "committed", "marked", "training", "killed"]
"""What the hook says of a save.

``""``: nothing; ``committed``: the hook's pin is whole; ``marked``: every rank of this node has
finished it; ``training``: a living training works on it; ``killed``: its training was killed.
"""

Span = tuple[str, int, int]
"""Of a checkpoint: its family, its step, and the mtime of its first file (ns)."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What ``trainer_state.json``, or a file of `TRACKERS`, says.

    ``step``: None if the file cannot be parsed.  ``last``: the step at which the training ends, 0
    if the file does not say.
    """

    step: int | None
    mtime: int
    last: int = 0


@dataclass(frozen=True, slots=True)
class UnendedTraining:
    """Evidence that the model in a run's root may be a copy of a save in the middle of training.

    ``checkpoint``: the Trainer's newest one that is no newer than the model, at ``step`` of
    ``last``; ``mtime``: its time (ns).  ``every``: seconds between it and the one before, 0 without
    one. ``is_followed``: another checkpoint was begun after the model was written.
    """

    checkpoint: str
    step: int
    last: int
    mtime: int
    every: float = 0.0
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """All facts about a save that decide whether it is finished.

    ``step``: its number by its name.  ``unclosed``: files that do not end as their format does.
    ``writing``: files that are open for writing (None: cannot be told).  ``marker``: what the
    file of `TRACKERS` beside the checkpoint says.  ``is_gone``: the trainer has removed the
    directory, and only the pin is left.  ``hook``: see `HookStatus`.  ``save``: the id that the
    ranks' markers give it. ``stable``: these very files were stable before (`fingerprint`).

    ``later``: a checkpoint of a later step lies beside it, all of it newer.  ``other_part``:
    another node's manifest of the same save is in the store.  ``has_trainer``: Hugging Face's
    Trainer writes in this output directory.  ``has_similar``: another stable checkpoint here has
    the same file names.

    ``was_emptied``: a name came or went in its directories after its last file was written:
    rotation may have begun.

    ``is_new``: all of it appeared between two scans, so nothing in it is of an older save.  Then
    the presence of the trainer's last file decides, whatever a clock that was set meanwhile made of
    times.

    ``unended``: for a final model, evidence that its training may go on.
    """

    family: Family
    step: int | None
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...] = ()
    state: TrainerState | None = None
    unclosed: tuple[str, ...] = ()
    writing: tuple[str, ...] | None = ()
    later: bool = False
    other_part: bool = False
    is_gone: bool = False
    hook: HookStatus = ""
    stable: bool = False
    marker: TrainerState | None = None
    is_new: bool = False
    has_trainer: bool = False
    has_similar: bool = False
    save: str = ""
    was_emptied: bool = False
    unended: UnendedTraining | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an output directory holds at one scan.

    ``processes``: the training processes that a hook has introduced.  ``marks``: the ranks'
    markers, by checkpoint.  ``spans``: of each numbered checkpoint.  ``has_trainer``: see
    `is_trainer_at_work`.
    """

    saves: Sequence[LocalSave] = ()
    processes: tuple[TrainingProcess, ...] = ()
    marks: Mapping[str, tuple[RankMark, ...]] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    has_trainer: bool = False


def find_surroundings(
    output_dir: Path, saves: Sequence[LocalSave], marked: Collection[str]
) -> Surroundings:
    """Return what lies around ``saves``, with the rank markers of the checkpoints ``marked``.

    No markers are read if no training process has introduced itself.  A marker that cannot be read
    is ignored.  Raises as `list_rank_marks`.
    """
    spool = output_dir / SPOOL
    processes = spool_markers.list_training_processes(spool)
    marks = (
        {name: spool_markers.list_rank_marks(spool, name) for name in marked} if processes else {}
    )
    spans = [
        (
            save.checkpoint_dir.family,
            save.checkpoint_dir.step,
            min(file.stat.mtime for file in save.files.by_path.values()),
        )
        for save in saves
        if save.checkpoint_dir.step is not None and save.files.by_path
    ]
    return Surroundings(saves, processes, marks, spans, is_trainer_at_work(saves, processes))


def is_trainer_at_work(saves: Iterable[LocalSave], processes: Iterable[TrainingProcess]) -> bool:
    """Return whether Hugging Face's Trainer writes in this output directory.

    One of its checkpoints, or its hook, shows it.  Then every checkpoint gets the Trainer's last
    file.
    """
    return any(TRAINER_STATE in save.files.by_path for save in saves) or any(
        process.trainer.startswith("transformers") for process in processes
    )


def observe(
    local_save: LocalSave, around: Surroundings, *, other_part: bool = False, is_new: bool = False
) -> Observation:
    """Return all facts about a save but ``has_similar``; opens all files and reads their ends.

    Raises Incomplete if files vanish meanwhile, StoreError.
    """
    files = local_save.files
    unclosed, writing = _check_files(files)
    observation = Observation(
        family=files.family,
        step=local_save.checkpoint_dir.step,
        files=files.stats,
        partial=files.partial,
        state=trainer_state(files),
        unclosed=unclosed,
        writing=writing,
        marker=_read_tracker(local_save.checkpoint_dir) if files.family in _TRACKED else None,
        is_new=is_new,
        was_emptied=not files.is_gone
        and local_save.checkpoint_dir.only is None
        and _was_emptied(local_save.checkpoint_dir.path, files.stats),
    )
    return with_surroundings(observation, local_save, around, other_part=other_part)


def with_surroundings(
    before: Observation, local_save: LocalSave, around: Surroundings, *, other_part: bool = False
) -> Observation:
    """Return an observation of unchanged files with what lies around them now.

    Reads no file of the save, but perhaps the trainer state of another (``unended``).
    """
    name, files = local_save.checkpoint, local_save.files.stats
    hook = hook_status(
        around, name, files, is_committed=local_save.pin is not None and local_save.pin.is_committed
    )
    marks = around.marks.get(name, ()) if hook == "marked" else ()
    return replace(
        before,
        later=is_later(local_save, around.spans),
        other_part=other_part,
        has_trainer=around.has_trainer,
        is_gone=local_save.files.is_gone,
        hook=hook,
        save=max(marks, key=lambda m: m.at).save if marks else "",
        stable=was_at_rest(local_save),
        unended=_unended_training(local_save, around, before.unended),
    )


def _unended_training(
    local_save: LocalSave, around: Surroundings, before: UnendedTraining | None
) -> UnendedTraining | None:
    """Return evidence that a final model's training may go on, or None.

    The evidence is the Trainer's newest checkpoint that is older than the model and not of the last
    step.  None for other saves, for a model that was begun later than a copy of that checkpoint
    would be, and where the training has ended: by its hook, or because it has left its state beside
    the model since, as scripts do at the end.  ``before``: the evidence of the last scan, to read
    no file twice.  Raises Incomplete if that checkpoint changes meanwhile.
    """
    files = local_save.files.by_path
    if local_save.files.family != FINAL or not files:
        return None
    mtimes = [file.stat.mtime for file in files.values()]
    last_written = max(mtimes)
    writers = [process for process in around.processes if process.at <= last_written / 1e9]
    if writers and all(p.ended for p in writers if p.train == writers[-1].train):
        return None
    state_times = [
        (state_file.stat.mtime, save)
        for save in around.saves
        if save.files.family == "trainer" and (state_file := save.files.by_path.get(TRAINER_STATE))
    ]
    *earlier, (state_time, newest) = sorted(
        ((0, local_save), *(pair for pair in state_times if pair[0] <= last_written)),
        key=itemgetter(0),
    )
    if not state_time or (TRAINER_STATE in files and files[TRAINER_STATE].stat.mtime >= state_time):
        return None
    model_begun = min(mtime for mtime in mtimes if mtime >= state_time)
    if model_begun - state_time > COPIED * 1e9:
        return None
    if before is None or (before.checkpoint, before.mtime) != (newest.checkpoint, state_time):
        state = trainer_state(newest.files)
        if state is None or state.step is None or state.step >= state.last:
            return None
        steps = (earlier[-1][1].checkpoint_dir.step or 0, newest.checkpoint_dir.step or 0)
        every = (state_time - earlier[-1][0]) / 1e9 if 0 < steps[0] < steps[1] else 0.0
        before = UnendedTraining(newest.checkpoint, state.step, state.last, state_time, every)
    is_followed = any(
        family == "trainer" and start > last_written for family, _, start in around.spans
    )
    return replace(before, is_followed=is_followed)


def is_later(local_save: LocalSave, spans: Iterable[Span]) -> bool:
    """Return whether a checkpoint of a later step was begun after all of this one was written.

    False without a step or files; checkpoints of another family do not count.
    """
    step = local_save.checkpoint_dir.step
    if step is None or not local_save.files.by_path:
        return False
    last_written = max(file.stat.mtime for file in local_save.files.by_path.values())
    return any(
        family == local_save.checkpoint_dir.family and other_step > step and start >= last_written
        for family, other_step, start in spans
    )


def is_like_another(local_save: LocalSave, saves: Iterable[LocalSave]) -> bool:
    """Return whether a stable save of the same family under another name has the same file names.

    Each save's own step within file names is ignored.
    """
    of_size = (
        other
        for other in saves
        if other.checkpoint != local_save.checkpoint
        and len(other.files.by_path) == len(local_save.files.by_path)
    )
    candidates = [
        other
        for other in of_size
        if other.checkpoint_dir.family == local_save.checkpoint_dir.family and was_at_rest(other)
    ]
    shape = _name_pattern(local_save)
    return any(_name_pattern(candidate) == shape for candidate in candidates)


def _name_pattern(local_save: LocalSave) -> frozenset[str]:
    """Return a save's file names with its step replaced by ``#``: scripts write it into names."""
    number = re.compile(rf"(?<![0-9])0*{local_save.checkpoint_dir.step}(?![0-9])")
    return frozenset(number.sub("#", name) for name in local_save.files.by_path)


def was_at_rest(local_save: LocalSave) -> bool:
    """Return whether the pin's notes say that these very files were stable.

    See `finished.is_stable`.
    """
    return (
        local_save.pin is not None
        and fingerprint(local_save.files.stats) == local_save.pin.notes.stable
    )


def fingerprint(files: Iterable[Stat]) -> int:
    """Return one positive number for these names, sizes and times; inodes do not matter."""
    lines = "\n".join(f"{f.path}\0{f.size}\0{f.mtime}" for f in sorted(files))
    return (
        int.from_bytes(
            hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=7).digest(), "big"
        )
        + 1
    )


# The hook's markers.


def hook_status(
    around: Surroundings,
    checkpoint: str,
    files: Sequence[Stat],
    *,
    is_committed: bool = False,
    is_running: Callable[[TrainingProcess], bool | None] = is_training,
) -> HookStatus:
    """Return what the hook's markers say of a checkpoint with these files.

    ``committed`` if ``is_committed``; else ``""`` without files, or if nothing below is true.  Only
    trainings that began before the newest file was written count.  The final model is
    ``training`` while one of them runs; else the last training decides: ``marked`` if every process
    has left it, else ``killed`` for the Trainer's.  Other checkpoints are ``marked`` if no file is
    newer than the last rank's marker, else ``training`` while one runs that marks all its saves.
    ``is_running``: whether a process may still write; None, unknown, counts as running.
    """
    if is_committed:
        return "committed"
    if not files:
        return ""
    newest = max(f.mtime for f in files) / 1e9
    # a training that began later did not write it
    writers = [process for process in around.processes if process.at <= newest]
    running_writers = [process for process in writers if is_running(process) is not False]
    if checkpoint == FINAL:
        if running_writers:
            return "training"
        # of the last training only: one that was killed and began again says nothing
        last_training = [process for process in writers if process.train == writers[-1].train]
        if last_training and all(process.left for process in last_training):
            return "marked"
        is_of_trainer = bool(last_training) and last_training[0].trainer.startswith("transformers")
        return "killed" if is_of_trainer else ""
    if newest <= _last_mark_time(around.marks.get(checkpoint, ())):
        return "marked"
    is_unmarked = any(not writer.ended and writer.marks == "all" for writer in running_writers)
    return "training" if is_unmarked else ""


def _last_mark_time(marks: Iterable[RankMark]) -> float:
    """Return when the last rank marked the newest save of a name, in seconds since the epoch.

    0 if a rank of this node has not, or if the number of ranks is unknown.
    """
    ordered = sorted(marks, key=lambda m: m.at)
    of_newest = [m for m in ordered if m.save == ordered[-1].save]
    # 0: nobody knew how many ranks write here
    ranks = of_newest[-1].local_world if of_newest else 0
    return of_newest[-1].at if 0 < ranks <= len({m.rank for m in of_newest}) else 0.0


# What the files say.


def trainer_state(files: LocalFiles) -> TrainerState | None:
    """Return what ``trainer_state.json`` says, or None if there is none.

    A torn file gives a state whose ``step`` is None.  Raises Incomplete if it changes meanwhile.
    """
    file = files.by_path.get(TRAINER_STATE)
    if file is None:
        return None
    try:
        state = parse(read_whole(files, TRAINER_STATE), TRAINER_STATE)
    except Corrupt:  # being written, or torn: the observation is that it cannot be parsed
        state = None
    step, last = (
        (state.get("global_step"), state.get("max_steps"))
        if isinstance(state, dict)
        else (None, None)
    )
    return TrainerState(
        step if type(step) is int else None, file.stat.mtime, last if type(last) is int else 0
    )


def _read_tracker(checkpoint_dir: CheckpointDir) -> TrainerState | None:
    """Return the step that a file of `TRACKERS` says is saved; None without a readable file.

    ``step`` is None if its first 64 bytes are no number.  The file lies beside the checkpoints, and
    only on the node of the process that writes it.
    """
    for name in TRACKERS:
        # not there, or not readable: then the files decide
        with contextlib.suppress(CkptsyncError, OSError):
            fd = open_checkpoint_file(checkpoint_dir.path.parent, name)
            try:
                text, mtime = os.read(fd, 64), os.fstat(fd).st_mtime_ns
            finally:
                os.close(fd)
            return TrainerState(int(text) if text.strip().isdigit() else None, mtime)
    return None


def _was_emptied(root: Path, files: Sequence[Stat]) -> bool:
    """Return whether a name came or went more than a second after the last file was written.

    By the mtimes of ``root``, of the files' directories, and of directories directly in ``root``.
    True also if a directory cannot be read: rotation is at work.
    """
    newest = max((f.mtime for f in files), default=0)
    try:
        below = {root / name for name in {f.path.rpartition("/")[0] for f in files}}
        # rotation takes files first
        with os.scandir(root) as entries:
            # Path.is_dir: links that lead to themselves are no directories, and no error
            left_empty = {path for entry in entries if (path := root / entry.name).is_dir()}
        return (
            max(folder.stat().st_mtime_ns for folder in {root, *below, *left_empty}) - newest
            > 10**9
        )
    except OSError:  # rotation
        return True


def _check_files(files: LocalFiles) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the files without their format's end, and those that a process has open for writing.

    Opens each file of a local file system: there the kernel refuses a read lease while a file is
    open for writing.  The second is None if none is known to be open but not all could be checked.
    Raises as `open_each`.
    """
    kinds = device_kinds()
    leasable = [
        file
        for file in files.by_path.values()
        if kinds.get(file.stat.device) in _LEASE_FILE_SYSTEMS
    ]
    unleasable = files.by_path.keys() - {file.stat.path for file in leasable}
    unclosed = [path for path in unleasable if not registry.closed(path, files)]
    leases: dict[str, bool | None] = dict.fromkeys(unleasable)
    for file, fd in open_each(leasable):
        path = file.stat.path
        if not registry.closed(path, OpenLocalFile(files, fd)):
            unclosed.append(path)
        leases[path] = has_lease(fd, fcntl.F_RDLCK)
    busy = tuple(sorted(path for path, granted in leases.items() if granted is False))
    return tuple(sorted(unclosed)), busy if busy or None not in leases.values() else None


def has_lease(fd: int, kind: int) -> bool | None:
    """Return whether the kernel grants a lease on an open file, which is given back at once.

    None if this file system grants none.
    """
    try:
        # the kernel tells a lease's holder of a writer by this signal; SIGIO, the default, would
        # end the process
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        return False if e.errno == errno.EAGAIN else None
    return True
