"""What training processes and the worker tell each other: small JSON files in the spool, each with one writer, written at one stroke.

    _ckptsync/trains/<process>.json                  a training process: who it is, which training it belongs to, whether it has left
    _ckptsync/saves/<checkpoint>@<save>/rank-<R>.json  this rank has written its part of the save
    _ckptsync/pins/<checkpoint>.<k>/commit.json      the hook: every rank that writes here was done when these files were pinned
    _ckptsync/pins/<checkpoint>.<k>/took.json        the worker: what its manifest says again if it is written a second time
    _ckptsync/hook.log                               what a hook had to say, a line each

Keys that are not known are ignored, and a file that cannot be read is no file: a mark is a hint about files, never the files.
Times are seconds on the node's own clock, or ns where they are integers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsync.spool import folders
from ckptsync.spool.reading import read

_LONGEST_LOG = 64 * 1024
_RANK = re.compile(r"rank-[0-9]{1,9}\.json")


@dataclass(frozen=True, slots=True)
class Begun:
    """A process that trains.

    ``train`` is empty until the ranks have agreed on it, ``local_world`` (how many ranks write into this output directory) is 0
    until then.  ``boot`` and ``began`` say which process it is (`is_running`); ``process`` names its file.  ``ended``: when its
    training ended, the final model may follow; ``left``: when the process had nothing more to write.  0: not yet.  ``marks``: whether it
    marks ``all`` of its saves, so that one without marks is not finished, or ``some``, as its script likes.
    """

    train: str
    rank: int
    world: int
    local_world: int
    host: str
    pid: int
    began: str
    boot: str
    at: float
    trainer: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    process: str = ""
    machine: str = ""
    ended: float = 0.0
    left: float = 0.0
    marks: str = "all"


@dataclass(frozen=True, slots=True)
class RankMark:
    """One rank has written all of its part of a save.  ``local_world`` of them, and everything in this output directory is written."""

    train: str
    save: str
    checkpoint: str
    step: int
    rank: int
    world: int
    local_world: int
    host: str
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class Commit:
    """A pin's files as the hook found them when ``ranks``, all that write here, were done: path → bytes, mtime in ns."""

    train: str
    save: str
    checkpoint: str
    step: int
    world: int
    ranks: tuple[int, ...]
    host: str
    trainer: str
    at: float
    files: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Took:
    """When a worker saw the pin finished, and when it began to send (ns); 0 or empty where it does not know yet.

    ``stable``: a number for the files that were seen whole and at rest, and for no others (`ckptsync.worker.settle.is_at_rest`).  ``read``: of files that were read
    and that the store had already (copies of a stored save), path → bytes, mtime (ns) and digest with spaces between them: they need not be read again.
    """

    stable: int = 0
    finished: int = 0
    sending: int = 0
    trainer: str = ""
    save: str = ""
    read: Mapping[str, str] = field(default_factory=dict)


def save_id(train: str, checkpoint: str, n: int) -> str:
    """The same on every rank, another for each time that a training saves this checkpoint; ``n`` counts those from 0."""
    return hashlib.sha256(f"{train}\0{checkpoint}\0{n}".encode()).hexdigest()[:16]


def begun_path(spool: Path, process: str) -> Path:
    """Where a process says who it is."""
    return spool / "trains" / f"{process}.json"


def save_folder(spool: Path, checkpoint: str, save: str) -> Path:
    """Where the ranks of one save leave their marks."""
    return spool / "saves" / f"{checkpoint}@{save}"


def write_mark(path: Path, mark: object) -> None:
    """Write one of the dataclasses above so that a reader sees all of it or nothing; folders are made.  Raises OSError."""
    folders.make(path.parent)
    folders.written(path.parent, path.name, dataclasses.asdict(mark))  # type: ignore[call-overload]  # any dataclass


def begun(spool: Path) -> tuple[Begun, ...]:
    """Every process that said that it trains here, in the order they began; those that are gone among them."""
    found = ((path, read(path, Begun)) for path in _children(spool / "trains") if path.suffix == ".json")
    named = (replace(begun, process=path.stem) for path, begun in found if begun is not None)  # whatever the file says
    return tuple(sorted(named, key=lambda b: (b.at, b.rank)))


def marks(spool: Path, checkpoint: str) -> tuple[RankMark, ...]:
    """The ranks' marks of every save of a checkpoint's name, in the order they were written."""
    folders = [f for f in _children(spool / "saves") if f.name.rpartition("@")[0] == checkpoint]
    found = (read(path, RankMark) for folder in folders for path in _children(folder) if _RANK.fullmatch(path.name))
    return tuple(sorted((m for m in found if m is not None), key=lambda m: (m.at, m.save, m.rank)))


def commit_of(pin_dir: Path) -> Commit | None:
    """What the hook said of a pin; ``None`` for one that no hook made."""
    return read(pin_dir / "commit.json", Commit)


def took_of(pin_dir: Path) -> Took:
    """What the worker said of a pin; nothing yet, if it has not."""
    return read(pin_dir / "took.json", Took) or Took()


def is_running(b: Begun) -> bool | None:
    """Whether that process may still write; ``None`` if it is of another machine or container, where nobody here can look."""
    if b.left:
        return False
    here = boot()
    if here and b.boot == here:
        return began(b.pid) == b.began != ""
    is_this_machine = b.host == socket.gethostname() and b.machine == machine() != ""
    return False if is_this_machine and b.boot.partition(" ")[0] != here.partition(" ")[0] else None


def boot() -> str:
    """One boot of one machine, and this container's processes; the empty string where the system does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def machine() -> str:
    """Which machine this is, over all its boots, as systemd says; the empty string where it does not."""
    try:
        return Path("/etc/machine-id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def began(pid: int) -> str:
    """When a process began, in the system's own unit; empty if there is none, or it only waits for its parent to notice its end."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def say(spool: Path, text: str) -> None:
    """Add a line to ``hook.log``; it begins anew when it has grown long.  Raises OSError."""
    path = spool / "hook.log"
    found = folders.status(path)
    if found is not None and found.st_size > _LONGEST_LOG:
        folders.rename(path, spool / "hook.log.1")
    with folders.append(path) as log:
        line = " ".join(text.split())[:2000] + "\n"
        log.write(line.encode("utf-8", "backslashreplace"))  # a name may be no UTF-8, and nobody may raise here


def said(spool: Path) -> tuple[str, ...]:
    """The last lines of ``hook.log``, oldest first; at most ten."""
    lines: list[str] = []
    for name in ("hook.log.1", "hook.log"):
        try:
            lines += (folders.read(spool / name, last=_LONGEST_LOG) or b"").decode("utf-8", "replace").splitlines()
        except OSError:  # noqa: PERF203  # not for us to know: two files
            continue
    return tuple(lines[-10:])


def _children(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in folders.names(folder) if not name.startswith(".")]
    except OSError:
        return []  # what cannot be listed says nothing: the files themselves decide
