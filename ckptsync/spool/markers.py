"""Small JSON files in the spool by which training processes and the worker share state.

The hook and the worker never talk to each other; they see each other's files.  Each file has one
writer and is written by one rename, so no lock is needed.

In <output_dir>/_ckptsync/:

    trains/<process>.json                    a training process: its training, and whether it
                                             has left
    saves/<checkpoint>@<save>/rank-<R>.json  this rank has written its part of the save
    pins/<checkpoint>.<k>/commit.json        the hook: every rank that writes here was done when
                                             these files were pinned
    pins/<checkpoint>.<k>/notes.json         the worker: when it saw the pin finished, and began to
                                             send it
    hook.log                                 the hook's log

Unknown keys are ignored, and a file that cannot be read counts as missing: a marker is a hint about
files, never the files.  Times are seconds on the node's own clock, or ns where they are integers.
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
# bytes for each list and object: a commit has 28 and more, and text of brackets alone would take
# fifty times its size in memory
_DENSE = 16
_LARGEST_NUMBER = 2**63 - 1  # what the store's records can hold
_LONGEST_LOG = 64 * 1024
COMMIT, NOTES = "commit.json", "notes.json"
_RANK = re.compile(r"rank-[0-9]{1,9}\.json")


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """A process that trains.

    ``train``: the training that it belongs to; empty until the ranks have agreed on it.
    ``local_world``: how many ranks write into this output directory; 0 until the ranks know.
    ``boot`` and ``began``: which process of the system it is (`is_training`).  ``process``: the
    name of its file.  ``ended``: when its training ended; the final model may follow.  ``left``:
    when the process had nothing more to write.  Both are 0 before that.  ``marks``: ``all`` if it
    marks each of its saves, so that a save without marks is not finished; ``some`` if its script
    decides.
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
    """States that one rank has written all of its part of a save.

    As soon as ``local_world`` ranks have such a mark, the output directory holds all of their
    files.
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
    """States which files a pin had when all ranks that write here were done.

    ``ranks``: those ranks.  ``files``: path → bytes and mtime in ns, as the hook found them.
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
    """States when a worker saw the pin finished, and when it began to send it (ns).

    A time is 0, and ``save`` empty, until the worker knows it.  ``stable``: the `fingerprint` of
    the files that were whole and unchanged for a while (`ckptsync.worker.finished.is_stable`).
    ``save``: the id of the save that was sent.
    """

    stable: int = 0
    finished: int = 0
    sending: int = 0
    save: str = ""


def save_id(train: str, checkpoint: str, n: int) -> str:
    """Return the id of a checkpoint's save number ``n`` (from 0), the same on every rank."""
    return hashlib.sha256(f"{train}\0{checkpoint}\0{n}".encode()).hexdigest()[:16]


def process_path(spool: Path, process: str) -> Path:
    """Return the path of a training process's own marker."""
    return spool / "trains" / f"{process}.json"


def save_folder(spool: Path, checkpoint: str, save: str) -> Path:
    """Return the directory that holds the ranks' markers of one save."""
    return spool / "saves" / f"{checkpoint}@{save}"


def write_mark(path: Path, mark: object) -> None:
    """Write a marker, one of the dataclasses above, so that a reader sees all of it or nothing.

    Missing directories are made.  Raises OSError.
    """
    safe_files.make_folders(path.parent)
    safe_files.write_json(path.parent, path.name, dataclasses.asdict(mark))  # type: ignore[call-overload]  # any dataclass


def list_training_processes(spool: Path) -> tuple[TrainingProcess, ...]:
    """Return every process that has trained here, by the time at which it began.

    Processes that have ended are among them until the hook removes their markers.
    """
    processes = (
        replace(mark, process=name.removesuffix(".json"))  # whatever the file says
        for name, mark in _marks_in(spool / "trains", TrainingProcess)
        if name.endswith(".json")
    )
    return tuple(sorted(processes, key=lambda process: (process.at, process.rank)))


def count_ranks_at(spool: Path, at: float) -> int | None:
    """Return the number of ranks of the training that ran here at a time, or None if unknown.

    ``at``: seconds since the epoch.  The process that began last before ``at`` and had not left
    decides.
    """
    worlds = [m.world for m in list_training_processes(spool) if m.at <= at and not 0 < m.left < at]
    return worlds[-1] if worlds else None


def list_rank_marks(spool: Path, checkpoint: str) -> tuple[RankMark, ...]:
    """Return the ranks' markers of all saves of a checkpoint's name, in the order of writing.

    Raises UnsafeSpool, or StoreError or ConfigError if the saves cannot be listed.
    """
    saves = safe_files.list_paths(spool / "saves")
    ranks = (
        mark
        for save in saves
        if save.name.rpartition("@")[0] == checkpoint
        for name, mark in _marks_in(save, RankMark)
        if _RANK.fullmatch(name)
    )
    return tuple(sorted(ranks, key=lambda m: (m.at, m.save, m.rank)))


def is_training(process: TrainingProcess) -> bool | None:
    """Return whether that process may still write; None if it is of another machine or container.

    False once it has left, is a zombie or gone, or another process has its id, and after a reboot
    of this machine.
    """
    if process.left:
        return False
    this_boot = boot_id()
    if this_boot and process.boot == this_boot:
        return start_time(process.pid) == process.began != ""
    is_this_machine = process.host == socket.gethostname() and process.machine == machine_id() != ""
    return (
        False
        if is_this_machine and process.boot.partition(" ")[0] != this_boot.partition(" ")[0]
        else None
    )


def boot_id() -> str:
    """Return an id of this boot of this machine and of this container's processes.

    The empty string if the system does not say.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()}"
            f" {Path('/proc/self/ns/pid').readlink()}"
        )
    except OSError:
        return ""


def machine_id() -> str:
    """Return systemd's id of this machine, the same over all boots; empty if it has none."""
    try:
        return Path("/etc/machine-id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def start_time(pid: int) -> str:
    """Return when a process began, in the system's own unit, as text.

    The empty string if there is no such process, or it is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def write_log(spool: Path, text: str) -> None:
    """Append a line to ``hook.log``, of at most 2000 characters.  Raises OSError.

    A log of more than 64 KiB is first renamed to ``hook.log.1``, which it replaces.
    """
    path = spool / "hook.log"
    status = safe_files.status(path)
    if status is not None and status.st_size > _LONGEST_LOG:
        safe_files.rename(path, spool / "hook.log.1")
    with safe_files.append(path) as log:
        line = " ".join(text.split())[:2000] + "\n"
        # a name may be no UTF-8, and nobody may raise here
        log.write(line.encode("utf-8", "backslashreplace"))


def read_log(spool: Path) -> tuple[str, ...]:
    """Return the last lines of ``hook.log``, oldest first, at most ten.

    Empty if it does not exist or cannot be read.
    """
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
    """Yield (file name, marker) of a folder's valid markers, by name; nothing if it is unreadable.

    Hidden and invalid files are left out.  Lazy: the folder stays open meanwhile.
    """
    # the files themselves decide
    with contextlib.suppress(OSError), safe_files.open_folder(folder) as fd:
        for name in safe_files.list_names_in(fd):
            if not name.startswith(".") and (mark := read_marker_in(fd, name, kind)) is not None:
                yield name, mark


def read_marker(path: Path, kind: Callable[..., _Marker]) -> _Marker | None:
    """Return a marker, or None if there is none, it is too large, or it is not a valid ``kind``."""
    with contextlib.suppress(OSError), safe_files.open_folder(path.parent) as fd:
        return read_marker_in(fd, path.name, kind)
    return None


def read_marker_in(folder: int, name: str, kind: Callable[..., _Marker]) -> _Marker | None:
    """Return a marker of an open directory, or None as `read_marker` does."""
    largest = _LARGEST.get(getattr(kind, "__name__", ""), _LARGE)
    try:
        return kind(**dict(_checked_fields(load_json(folder, name, largest), kind)))
    except (OSError, ValueError, TypeError):
        return None  # gone, half deleted or not ours: no mark, as the docstring of the module says


def load_json(folder: int, name: str, largest: int = _LARGE) -> object:
    """Return the JSON value in a small file of an open directory.

    None if there is no such file, or if it is larger than ``largest`` bytes, is no JSON, or has too
    many lists and objects for its size.  Raises OSError.
    """
    data = safe_files.read_in(folder, name, largest) or b"null"
    if data.count(b"[") + data.count(b"{") > 1000 + len(data) // _DENSE:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        # ValueError: also for invalid UTF-8, and for numbers of too many digits
        return None


def _checked_fields(raw: object, kind: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Yield name and value of each field of a dataclass that ``raw`` has; other keys are ignored.

    Raises TypeError or ValueError for a value that is not of its field's type.
    """
    if not isinstance(raw, dict):
        raise TypeError(raw)
    for field_of_kind in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass of this module
        if field_of_kind.name in raw:
            yield field_of_kind.name, _TYPES[str(field_of_kind.type)](raw[field_of_kind.name])


def _text(raw: object) -> str:
    """Return a text.

    Raise TypeError for another type, ValueError for text that is not valid UTF-8.
    """
    if not isinstance(raw, str):
        raise TypeError(raw)
    raw.encode()
    return raw


def _whole(raw: object) -> int:
    """Return an integer of at most 64 bits; raise TypeError for anything else."""
    if not isinstance(raw, int) or isinstance(raw, bool) or abs(raw) > _LARGEST_NUMBER:
        raise TypeError(raw)
    return raw


def _number(raw: object) -> float:
    """Return a finite number as a float; raise TypeError or ValueError for anything else."""
    number = raw if isinstance(raw, float) else float(_whole(raw))
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _integers(raw: object) -> tuple[int, ...]:
    """Return a list of integers as a tuple; raise TypeError for anything else."""
    if not isinstance(raw, list):
        raise TypeError(raw)
    return tuple(_whole(r) for r in raw)


def _items(raw: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a JSON object; raise TypeError for anything else."""
    if not isinstance(raw, dict):
        raise TypeError(raw)
    yield from raw.items()


def _facts(raw: object) -> dict[str, str]:
    """Return an object of texts, with invalid UTF-8 replaced; raise TypeError for anything else."""
    facts = {}
    for key, value in _items(raw):
        if not isinstance(value, str):
            raise TypeError(value)
        facts[key.encode("utf-8", "replace").decode()] = value.encode("utf-8", "replace").decode()
    return facts


def _files(raw: object) -> dict[str, tuple[int, int]]:
    """Return path → (size, mtime); raise TypeError or ValueError for anything else."""
    files = {}
    for path, entry in _items(raw):
        size, mtime = _integers(entry)
        files[path] = (size, mtime)  # a name of a file, which may be no UTF-8
    return files


_TYPES: Mapping[str, Callable[[object], object]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "tuple[int, ...]": _integers,
    "Mapping[str, str]": _facts,
    "Mapping[str, tuple[int, int]]": _files,
}
