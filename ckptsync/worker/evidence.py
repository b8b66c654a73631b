"""What the files of a checkpoint say of themselves: read here, judged in ``settle``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.layouts import table
from ckptsync.model import read_whole
from ckptsync.parsing import parse
from ckptsync.scan import Spot
from ckptsync.spool.folders import status
from ckptsync.spool.marks import is_running
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat, open_file
from ckptsync.worker.cut_short import TRAINER_STATE
from ckptsync.worker.evenness import current, lacking
from ckptsync.worker.hold import Held, Hold, each_open
from ckptsync.worker.hooked import NOBODY, Hooked, word
from ckptsync.worker.observed import Evidence, TrainerState
from ckptsync.worker.resting import was_at_rest

# Where a refused lease means that somebody writes.  NFS and FUSE refuse leases for reasons of their own.
_LEASE_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "zfs", "bcachefs"})
# Where a directory's time says when a name in it came or went, on the clock that dates the files.  FUSE says what it likes.
_HONEST_FOLDERS = frozenset({*_LEASE_FILE_SYSTEMS, "nfs", "nfs4", "overlay"})
_MOUNTS = Path("/proc/self/mountinfo")
VERL_MARKER = "latest_checkpointed_iteration.txt"


def gather(
    hold: Hold,
    spot: Spot,
    *,
    later: bool,
    mates: bool,
    fresh: bool = False,
    awaited: bool = False,
    pin: Pin | None = None,
    hooked: Hooked = NOBODY,
) -> Evidence:
    """All facts about a checkpoint.  ``pin``: the one that ``hold`` reads from.  Raises Incomplete if files vanish meanwhile: look again."""
    files = hold.stats
    return Evidence(
        family=hold.family,
        step=spot.step,
        files=files,
        partial=hold.partial,
        state=trainer_state(hold),
        unclosed=tuple(name for name in sorted(hold.held) if not table.closed(name, hold)),
        writing=writing(hold.held.values()),
        later=later,
        mates=mates,
        gone=hold.gone,
        hook=word(hooked, pin, spot.name, is_running),
        stable=pin is not None and was_at_rest(pin.took.stable, files),
        marker=verl_marker(spot) if hold.family == "verl" else None,
        folders=0 if hold.gone or spot.only is not None else folders(spot.path, files),
        pulse=_pulse(pin),
        missing=lacking([f.path for f in files] if fresh else current(files)),
        fresh=fresh,
        awaited=awaited,
    )


def verl_marker(spot: Spot) -> TrainerState | None:
    """The step that verl's driver says is written.  It lies beside the checkpoints, on the driver's node, and only there."""
    try:
        fd = open_file(spot.path.parent, VERL_MARKER)
        try:
            told, mtime = os.read(fd, 64), os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
    except (CkptsyncError, OSError):  # not there, or not to be read: then it says nothing, and the files decide
        return None
    return TrainerState(int(told) if told.strip().isdigit() else None, mtime)


def folders(root: Path, files: Iterable[Stat]) -> int:
    """When a name last came or went in the directories of these files (ns); 0 where the file system does not tell, or they are gone."""
    try:
        if file_system(root) not in _HONEST_FOLDERS:
            return 0
        below = {root / f.path.rpartition("/")[0] for f in files}
        emptied = {path for path in root.iterdir() if path.is_dir()}  # rotation takes files first
        return max(folder.stat().st_mtime_ns for folder in {root, *below, *emptied})
    except OSError:  # rotation
        return 0


def _pulse(pin: Pin | None) -> int:
    """The file system's clock at this look, or the last one."""
    if pin is None:
        return 0
    try:
        found = status(pin.path / "owner.json")
    except OSError:  # a look says why
        return 0
    return found.st_mtime_ns if found else 0  # nobody's yet


def trainer_state(hold: Hold) -> TrainerState | None:
    """``trainer_state.json``, if there is one."""
    held = hold.held.get(TRAINER_STATE)
    if held is None:
        return None
    try:
        told = parse(read_whole(hold, TRAINER_STATE), TRAINER_STATE)
    except Corrupt:  # being written, or torn: that it does not parse is the fact
        told = None
    step = told.get("global_step") if isinstance(told, dict) else None
    return TrainerState(step if type(step) is int else None, held.stat.mtime)


def writing(files: Iterable[Held]) -> tuple[str, ...] | None:
    """Names that somebody holds open for writing; ``None`` if none is known to be, but not all could be asked.

    A read lease is refused while a file is open for writing.  Where there are no leases, root looks at all processes.
    """
    types = _file_systems()
    several = [(h, types.get(h.stat.device) in _LEASE_FILE_SYSTEMS) for h in files]
    asked = [(h, _is_leased_for_writing(fd)) for h, fd in each_open(h for h, has_leases in several if has_leases)]
    unknown = [h.stat for h, has_leases in several if not has_leases] + [h.stat for h, answer in asked if answer is None]
    busy = [h.stat.path for h, answer in asked if answer] + _in_descriptors(unknown)
    return tuple(sorted(busy)) if busy or not unknown else None


def _is_leased_for_writing(fd: int) -> bool | None:
    try:
        # the kernel tells a lease's holder of a writer by this signal; SIGIO, the default, would end the process
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        return True if e.errno == errno.EAGAIN else None
    return False


def _in_descriptors(files: Iterable[Stat]) -> list[str]:
    """Those that a process of this machine writes to.  Others than root see too little, and a writer may sit elsewhere."""
    wanted = {(f.inode, f.device): f.path for f in files}
    busy = []
    for link in Path("/proc").glob("[0-9]*/fd/*") if wanted and os.geteuid() == 0 else ():
        with contextlib.suppress(OSError):  # processes end while we look
            found = link.stat()
            path = wanted.get((found.st_ino, found.st_dev))
            if path is not None and _is_writable(link):
                busy.append(path)
    return busy


def _is_writable(link: Path) -> bool:
    told = re.search(r"^flags:\s+([0-7]+)", (link.parent.parent / "fdinfo" / link.name).read_text(), re.MULTILINE)
    return told is not None and int(told[1], 8) & os.O_ACCMODE != os.O_RDONLY


def file_system(path: Path) -> str:
    """The type of the file system that a path lies on; empty where it cannot be told.  Raises OSError if it is gone."""
    return _file_systems().get(path.stat().st_dev, "")


def _file_systems() -> dict[int, str]:
    """The type of each mounted device."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # no /proc here: nothing is known, which is what an empty table says
        return {}
    return dict(_mounts(lines))


def _mounts(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        left, dash, right = line.partition(" - ")
        fields = left.split()
        if dash and len(fields) > 2 and right:
            major, _, minor = fields[2].partition(":")
            yield os.makedev(int(major), int(minor)), right.split()[0]
