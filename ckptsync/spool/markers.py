"""Small JSON files in the spool by which training processes and the worker share state.

Each file has one writer.

In <output_dir>/_ckptsync/:

    trains/<process>.json                    a training process: who it is, which training it
                                             belongs to, whether it has left
    saves/<checkpoint>@<save>/rank-<R>.json  this rank has written its part of the save
    pins/<checkpoint>.<k>/commit.json        the hook: every rank that writes here was done when
                                             these files were pinned
    pins/<checkpoint>.<k>/notes.json         the worker: when it saw the pin finished, and began to
                                             send it
    hook.log                                 the hook's log

Each is written at one stroke.  Keys that are not known are ignored, and a file that cannot be read
is no file: a marker is a hint about files, never the files.  Times are seconds on the node's own
clock, or ns where they are integers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ckptsync.spool import safe_files

_LARGEST = {"Commit": 32 * 1024 * 1024}  # bytes: 120,000 files and more
_LARGE = 4 * 1024 * 1024  # of all else
# bytes for each list and object: a commit has 28 and more, and what is all brackets takes fifty
# times its size
_DENSE = 16
_LARGEST_NUMBER = 2**63 - 1  # what the store's records can hold
_LONGEST_LOG = 64 * 1024
COMMIT, NOTES = "commit.json", "notes.json"
_RANK = re.compile(r"rank-[0-9]{1,9}\.json")


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """A process that trains.

    ``train`` is empty until the ranks have agreed on it, ``local_world`` (how many ranks write into
    this output directory) is 0 until then.  ``boot`` and ``began`` say which process it is
    (`is_training`); ``process`` names its file.  ``ended``: when its training ended, the final
    model may follow; ``left``: when the process had nothing more to write.  0: not yet.  ``marks``:
    whether it marks ``all`` of its saves, so that one without marks is not finished, or ``some``,
    as its script likes.
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
    """One rank has written all of its part of a save.

    ``local_world`` of them, and everything in this output directory is written.
    """

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
    """A pin's files when ``ranks`` were done: path → bytes, mtime in ns.

    ``ranks`` are all that write here; the hook recorded the files as it found them then.
    """

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
class PinNotes:
    """When a worker saw the pin finished, and when it began to send (ns).

    0 or empty where it does not know yet. ``stable``: a number for the files that were seen whole
    and at rest, and for no others (`ckptsync.worker.finished.is_stable`). ``save``: the id of the
    save that was sent.
    """

    stable: int = 0
    finished: int = 0
    sending: int = 0
    save: str = ""


def save_id(train: str, checkpoint: str, n: int) -> str:
    """Return an id, the same on every rank, another for each save of this checkpoint.

    ``n`` counts those from 0.
    """
    return hashlib.sha256(f"{train}\0{checkpoint}\0{n}".encode()).hexdigest()[:16]


def process_path(spool: Path, process: str) -> Path:
    """Return where a process says who it is."""
    return spool / "trains" / f"{process}.json"


def save_folder(spool: Path, checkpoint: str, save: str) -> Path:
    """Return where the ranks of one save leave their markers."""
    return spool / "saves" / f"{checkpoint}@{save}"


def write_mark(path: Path, mark: object) -> None:
    """Write one of the dataclasses above so that a reader sees all of it or nothing.

    Folders are made.  Raises OSError.
    """
    safe_files.make_folders(path.parent)
    safe_files.write_json(path.parent, path.name, dataclasses.asdict(mark))  # type: ignore[call-overload]  # any dataclass


def list_training_processes(spool: Path) -> tuple[TrainingProcess, ...]:
    """Return every process that has trained here, in the order they began.

    Also those that are gone.
    """
    processes = (
        replace(mark, process=name.removesuffix(".json"))  # whatever the file says
        for name, mark in _marks_in(spool / "trains", TrainingProcess)
        if name.endswith(".json")
    )
    return tuple(sorted(processes, key=lambda b: (b.at, b.rank)))


def count_ranks_at(spool: Path, at: float) -> int | None:
    """Return the number of ranks of the training that ran here at a time.

    ``at``: seconds since the epoch.  The mark of the last process that had begun and not left by
    then says it; None if there is no such mark.
    """
    worlds = [m.world for m in list_training_processes(spool) if m.at <= at and not 0 < m.left < at]
    return worlds[-1] if worlds else None


def list_rank_marks(spool: Path, checkpoint: str) -> tuple[RankMark, ...]:
    """Return the ranks' markers of all saves of a checkpoint's name, in the order of writing."""
    saves = safe_files.list_paths(spool / "saves")
    ranks = (
        mark
        for save in saves
        if save.name.rpartition("@")[0] == checkpoint
        for name, mark in _marks_in(save, RankMark)
        if _RANK.fullmatch(name)
    )
    return tuple(sorted(ranks, key=lambda m: (m.at, m.save, m.rank)))


def is_training(b: TrainingProcess) -> bool | None:
    """Return whether that process may still write.

    ``None`` if it is of another machine or container.
    """
    if b.left:
        return False
    here = boot_id()
    if here and b.boot == here:
        return start_time(b.pid) == b.began != ""
    is_this_machine = b.host == socket.gethostname() and b.machine == machine_id() != ""
    return False if is_this_machine and b.boot.partition(" ")[0] != here.partition(" ")[0] else None


def boot_id() -> str:
    """Return an id of this boot of this machine and this container's processes.

    "" where the system does not say.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()}"
            f" {Path('/proc/self/ns/pid').readlink()}"
        )
    except OSError:
        return ""


def machine_id() -> str:
    """Return an id of this machine over all its boots, as systemd has it; "" where it has none."""
    try:
        return Path("/etc/machine-id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def start_time(pid: int) -> str:
    """Return when a process began, in the system's own unit.

    "" if there is none, or it is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def write_log(spool: Path, text: str) -> None:
    """Add a line to ``hook.log``; it begins anew when it has grown long.  Raises OSError."""
    path = spool / "hook.log"
    found = safe_files.status(path)
    if found is not None and found.st_size > _LONGEST_LOG:
        safe_files.rename(path, spool / "hook.log.1")
    with safe_files.append(path) as log:
        line = " ".join(text.split())[:2000] + "\n"
        # a name may be no UTF-8, and nobody may raise here
        log.write(line.encode("utf-8", "backslashreplace"))


def read_log(spool: Path) -> tuple[str, ...]:
    """Return the last lines of ``hook.log``, oldest first; at most ten."""
    lines: list[str] = []
    for name in ("hook.log.1", "hook.log"):
        try:
            lines += (
                (safe_files.read(spool / name, last=_LONGEST_LOG) or b"")
                .decode("utf-8", "replace")
                .splitlines()
            )
        except OSError:  # noqa: PERF203  # not for us to know: two files
            continue
    return tuple(lines[-10:])


_Marker = TypeVar("_Marker")


def _marks_in(folder: Path, kind: Callable[..., _Marker]) -> Iterator[tuple[str, _Marker]]:
    """Yield the markers in a folder with their names; nothing if it cannot be listed."""
    # the files themselves decide
    with contextlib.suppress(OSError), safe_files.open_folder(folder) as fd:
        for name in safe_files.list_names_in(fd):
            if not name.startswith(".") and (mark := read_marker_in(fd, name, kind)) is not None:
                yield name, mark


def read_marker(path: Path, kind: Callable[..., _Marker]) -> _Marker | None:
    """Return what a marker says; ``None`` if it is not there, too large, or not a ``kind``."""
    with contextlib.suppress(OSError), safe_files.open_folder(path.parent) as fd:
        return read_marker_in(fd, path.name, kind)
    return None


def read_marker_in(folder: int, name: str, kind: Callable[..., _Marker]) -> _Marker | None:
    """Return what a marker in an open directory says, as `read_marker` does."""
    largest = _LARGEST.get(getattr(kind, "__name__", ""), _LARGE)
    try:
        return kind(**dict(_known(load_json(folder, name, largest), kind)))
    except (OSError, ValueError, TypeError):
        return None  # gone, half deleted or not ours: no mark, as the docstring of the module says


def load_json(folder: int, name: str, largest: int = _LARGE) -> object:
    """Return the JSON in a small file of an open directory, whatever it is.

    ``None`` if it is not there, too large, too deep, or no JSON.  Raises OSError.
    """
    data = safe_files.read_in(folder, name, largest) or b"null"
    if data.count(b"[") + data.count(b"{") > 1000 + len(data) // _DENSE:
        return None
    try:
        return json.loads(data)
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ):  # also of invalid UTF-8, and of numbers of too many digits
        return None


def _known(raw: object, kind: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Yield the keys that a dataclass has, each of its type.

    Raise TypeError or ValueError where one is not.
    """
    if not isinstance(raw, dict):
        raise TypeError(raw)
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass of this module
        if each.name in raw:
            yield each.name, _TYPES[str(each.type)](raw[each.name])


def _text(raw: object) -> str:
    """Raise ValueError for what is no UTF-8: a store could not hold it."""
    if not isinstance(raw, str):
        raise TypeError(raw)
    raw.encode()
    return raw


def _whole(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or abs(raw) > _LARGEST_NUMBER:
        raise TypeError(raw)
    return raw


def _number(raw: object) -> float:
    number = raw if isinstance(raw, float) else float(_whole(raw))
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _ranks(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise TypeError(raw)
    return tuple(_whole(r) for r in raw)


def _items(raw: object) -> Iterator[tuple[str, object]]:
    if not isinstance(raw, dict):
        raise TypeError(raw)
    yield from raw.items()


def _facts(raw: object) -> dict[str, str]:
    """Return texts for people: of a variable that is no UTF-8 what can be shown."""
    found = {}
    for key, value in _items(raw):
        if not isinstance(value, str):
            raise TypeError(value)
        found[key.encode("utf-8", "replace").decode()] = value.encode("utf-8", "replace").decode()
    return found


def _files(raw: object) -> dict[str, tuple[int, int]]:
    found = {}
    for path, entry in _items(raw):
        size, mtime = _ranks(entry)
        found[path] = (size, mtime)  # a name of a file, which may be no UTF-8
    return found


_TYPES: Mapping[str, Callable[[object], object]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "tuple[int, ...]": _ranks,
    "Mapping[str, str]": _facts,
    "Mapping[str, tuple[int, int]]": _files,
}
