"""What one look found of a save: its files, what they and the hook's markers say of it, and what lies around it.  Judged in `worker.settle`.

A file system gives the facts, and nothing here decides whether a save is finished.  Files decide what is stored; a marker of the hook only
says sooner that they are all there.  Times of markers and files are compared, which is fair on one machine.  Where clocks differ, or one was
set, a marker says less than it might, and the files are judged as they are without a hook.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.layouts import table
from ckptsync.model import read_whole
from ckptsync.parsing import parse
from ckptsync.scan import FINAL, Family, Spot
from ckptsync.spool import marks as spool_marks
from ckptsync.spool.marks import Begun, RankMark, is_running
from ckptsync.walk import OURS, Stat, open_file
from ckptsync.worker.snapshot import Held, Hold, Seen, each_open
from ckptsync.worker.torn_saves import TRAINER_STATE

VERL_MARKER = "latest_checkpointed_iteration.txt"
_MOUNTS = Path("/proc/self/mountinfo")
# Where a refused lease means that somebody writes.  NFS and FUSE refuse leases for reasons of their own.
_LEASE_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "zfs", "bcachefs"})

HookStatus = Literal["", "committed", "marked", "training", "killed"]
"""What the hook says of a save: nothing; its pin is whole; every rank here is done with it; a living training works on it; its training was killed."""

Span = tuple[str, int, int]
"""Of a checkpoint: its family, its step, and the mtime of its first file (ns)."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """``trainer_state.json``, or what verl writes instead.  ``step`` is ``None`` if it cannot be parsed."""

    step: int | None
    mtime: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look found of a save.  ``step`` is its number by its name.

    ``unclosed``: files without the end that their format gives them.  ``writing``: files that are open for writing (``None``: cannot be told).
    ``marker``: verl's ``latest_checkpointed_iteration.txt``.  ``gone``: the trainer has removed the directory, only the pin is left.
    ``hook``: see `HookStatus`; ``save``: the id that the ranks' markers give it.  ``stable``: these very files were at rest before (`fingerprint`).

    ``later``: a later checkpoint lies beside it, all of it newer.  ``mates``: another node's manifest of the same save is in the store.
    ``awaited``: Hugging Face's Trainer writes in this output directory.  ``alike``: another checkpoint here, at rest for long, has the same file names.

    ``emptied``: a name came or went in its directories after its last file was written: rotation may have begun.

    ``fresh``: all of it appeared between two looks, so that nothing in it is of an older save.  Then the presence of the trainer's last file tells,
    whatever a clock that was set meanwhile made of the files' times.
    """

    family: Family
    step: int | None
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...] = ()
    state: TrainerState | None = None
    unclosed: tuple[str, ...] = ()
    writing: tuple[str, ...] | None = ()
    later: bool = False
    mates: bool = False
    gone: bool = False
    hook: HookStatus = ""
    stable: bool = False
    marker: TrainerState | None = None
    fresh: bool = False
    awaited: bool = False
    alike: bool = False
    save: str = ""
    emptied: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an output directory holds at one look.  ``begun``: the trainings that a hook told of; ``marks``: by checkpoint, those of its ranks."""

    saves: Sequence[Seen] = ()
    begun: tuple[Begun, ...] = ()
    marks: Mapping[str, tuple[RankMark, ...]] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    awaited: bool = False


def surroundings(output_dir: Path, saves: Sequence[Seen], marked: Collection[str]) -> Surroundings:
    """Return what lies around each of ``saves``, with the markers of the checkpoints ``marked``.  Never raises: an unreadable marker is none."""
    spool = output_dir / OURS
    begun = spool_marks.begun(spool)
    marks = {name: spool_marks.marks(spool, name) for name in marked} if begun else {}
    spans = [
        (one.spot.family, one.spot.step, min(h.stat.mtime for h in one.hold.held.values()))
        for one in saves
        if one.spot.step is not None and one.hold.held
    ]
    return Surroundings(saves, begun, marks, spans, is_trainer_at_work(saves, begun))


def is_trainer_at_work(saves: Iterable[Seen], begun: Iterable[Begun]) -> bool:
    """Return whether Hugging Face's Trainer writes in this output directory, by its checkpoints or by its hook: then each gets its last file."""
    return any(TRAINER_STATE in one.hold.held for one in saves) or any(b.trainer.startswith("transformers") for b in begun)


def observe(seen: Seen, around: Surroundings, *, mates: bool = False, fresh: bool = False) -> Observation:
    """Return all facts about a save; reads the ends of all its files.  Raises Incomplete if files vanish meanwhile: look again."""
    hold = seen.hold
    found = Observation(
        family=hold.family,
        step=seen.spot.step,
        files=hold.stats,
        partial=hold.partial,
        state=trainer_state(hold),
        unclosed=tuple(name for name in sorted(hold.held) if not table.closed(name, hold)),
        writing=open_for_writing(hold.held.values()),
        marker=_verl_marker(seen.spot) if hold.family == "verl" else None,
        fresh=fresh,
        emptied=not hold.gone and seen.spot.only is None and _was_emptied(seen.spot.path, hold.stats),
    )
    return with_surroundings(found, seen, around, mates=mates)


def with_surroundings(before: Observation, seen: Seen, around: Surroundings, *, mates: bool = False) -> Observation:
    """Return the same observation of files that have not changed, with what lies around them now."""
    name, files = seen.spot.name, seen.hold.stats
    hook = hook_status(around, name, files, is_committed=seen.pin is not None and seen.pin.is_committed)
    marks = around.marks.get(name, ()) if hook == "marked" else ()
    return replace(
        before,
        later=is_later(seen, around.spans),
        mates=mates,
        awaited=around.awaited,
        gone=seen.hold.gone,
        hook=hook,
        save=max(marks, key=lambda m: m.at).save if marks else "",
        stable=was_at_rest(seen),
    )


def is_later(seen: Seen, spans: Iterable[Span]) -> bool:
    """Return whether a checkpoint with a higher number, of the same family, was begun when all of this one had been written."""
    step = seen.spot.step
    if step is None or not seen.hold.held:
        return False
    end = max(h.stat.mtime for h in seen.hold.held.values())
    return any(family == seen.spot.family and other > step and start >= end for family, other, start in spans)


def is_like_another(seen: Seen, saves: Iterable[Seen]) -> bool:
    """Return whether one of ``saves`` is of another step, holds files of the same names, and was at rest for long (`settle.is_at_rest`)."""
    of_size = (o for o in saves if o.spot.name != seen.spot.name and len(o.hold.held) == len(seen.hold.held))
    others = [o for o in of_size if o.spot.family == seen.spot.family and was_at_rest(o)]
    shape = _shape(seen)
    return any(_shape(other) == shape for other in others)


def _shape(seen: Seen) -> frozenset[str]:
    """Return file names without the step, which scripts like to write into them."""
    number = re.compile(rf"(?<![0-9])0*{seen.spot.step}(?![0-9])")
    return frozenset(number.sub("#", name) for name in seen.hold.held)


def was_at_rest(seen: Seen) -> bool:
    """Return whether the pin says that these files were at rest: none was added since, taken away, or written again."""
    return seen.pin is not None and seen.pin.took.stable > 0 and fingerprint(seen.hold.stats) == seen.pin.took.stable


def fingerprint(files: Iterable[Stat]) -> int:
    """Return one positive number for these names, sizes and times: a copy of a file is as good as the file."""
    lines = "\n".join(f"{f.path}\0{f.size}\0{f.mtime}" for f in sorted(files))
    return int.from_bytes(hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=7).digest(), "big") + 1


# The hook's markers.


def hook_status(
    around: Surroundings,
    checkpoint: str,
    files: Sequence[Stat],
    *,
    is_committed: bool = False,
    runs: Callable[[Begun], bool | None] = is_running,
) -> HookStatus:
    """Return what the hook says of a checkpoint with these files.  ``runs``: whether a training's process may still write."""
    if is_committed:
        return "committed"
    if not files:
        return ""
    newest = max(f.mtime for f in files) / 1e9
    writers = [b for b in around.begun if b.at <= newest]  # a training that began later did not write it
    living = [b for b in writers if runs(b) is not False]
    if checkpoint == FINAL:
        return "training" if living else _status_of_final(writers)
    if newest <= _marked_at(around.marks.get(checkpoint, ())):
        return "marked"
    return "training" if any(not b.ended and b.marks == "all" for b in living) else ""


def _status_of_final(writers: Sequence[Begun]) -> HookStatus:
    """Return whether the last training was done with the model in the output directory, or killed.  ``writers`` are in the order in which they began."""
    last = [b for b in writers if b.train == writers[-1].train]  # a training that was killed and began again says nothing
    if last and all(b.left for b in last):
        return "marked"
    return "killed" if last and last[0].trainer.startswith("transformers") else ""


def _marked_at(marks: Iterable[RankMark]) -> float:
    """Return when the last rank that writes here marked the newest save of a name; 0 if a rank has not."""
    ordered = sorted(marks, key=lambda m: m.at)
    of_newest = [m for m in ordered if m.save == ordered[-1].save]
    wanted = of_newest[-1].local_world if of_newest else 0  # 0: nobody knew how many ranks write here
    return of_newest[-1].at if 0 < wanted <= len({m.rank for m in of_newest}) else 0.0


# What the files say.


def trainer_state(hold: Hold) -> TrainerState | None:
    """Return ``trainer_state.json``, if there is one."""
    held = hold.held.get(TRAINER_STATE)
    if held is None:
        return None
    try:
        state = parse(read_whole(hold, TRAINER_STATE), TRAINER_STATE)
    except Corrupt:  # being written, or torn: the observation is that it cannot be parsed
        state = None
    step = state.get("global_step") if isinstance(state, dict) else None
    return TrainerState(step if type(step) is int else None, held.stat.mtime)


def _verl_marker(spot: Spot) -> TrainerState | None:
    """Return the step that verl's driver says is written.  The file lies beside the checkpoints, and only on the driver's node."""
    try:
        fd = open_file(spot.path.parent, VERL_MARKER)
        try:
            text, mtime = os.read(fd, 64), os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
    except (CkptsyncError, OSError):  # not there, or not readable: then the files decide
        return None
    return TrainerState(int(text) if text.strip().isdigit() else None, mtime)


def _was_emptied(root: Path, files: Sequence[Stat]) -> bool:
    """Return whether a name came or went in the directories of these files more than a second after the last of them was written."""
    newest = max((f.mtime for f in files), default=0)
    try:
        below = {root / f.path.rpartition("/")[0] for f in files}
        left_empty = {path for path in root.iterdir() if path.is_dir()}  # rotation takes files first
        return max(folder.stat().st_mtime_ns for folder in {root, *below, *left_empty}) - newest > 10**9
    except OSError:  # rotation
        return True


def open_for_writing(files: Iterable[Held]) -> tuple[str, ...] | None:
    """Return the names that a process holds open for writing; ``None`` if none is known to be, but not all could be asked.

    The kernel refuses a read lease while a file is open for writing.
    """
    types = _file_systems()
    every = list(files)
    with_leases = [held for held in every if types.get(held.stat.device) in _LEASE_FILE_SYSTEMS]
    answers = [(held.stat.path, _is_open_for_writing(fd)) for held, fd in each_open(with_leases)]
    busy = tuple(sorted(path for path, answer in answers if answer))
    is_known = len(answers) == len(every) and all(answer is not None for _, answer in answers)
    return busy if busy or is_known else None


def _is_open_for_writing(fd: int) -> bool | None:
    try:
        # the kernel tells a lease's holder of a writer by this signal; SIGIO, the default, would end the process
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        return True if e.errno == errno.EAGAIN else None
    return False


def _file_systems() -> dict[int, str]:
    """Return the file system type of each mounted device; nothing where there is no /proc."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        left, dash, right = line.partition(" - ")
        fields = left.split()
        if dash and len(fields) > 2 and right:
            major, _, minor = fields[2].partition(":")
            found[os.makedev(int(major), int(minor))] = right.split()[0]
    return found
