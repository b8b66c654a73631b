"""A store's work as the steps that a power cut may undo, read out of its system calls by strace.

Inodes are numbers, 0 is the store's root, whose own location is durable.  What a system call does
is followed through descriptors, not paths.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACED = (
    "openat,openat2,creat,close,dup,dup2,dup3,fcntl,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,copy_file_range,sendfile,"
    "fsync,fdatasync,sync_file_range,sync,syncfs,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat"
)
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\w+|\?)(?: .*)?")
_HERE = "AT_FDCWD"
_OTHER = re.compile(r"\d+ +(\+\+\+|---) .*")  # an end, a signal


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes at a location of a file; ``data`` ends the file there if it is ``None``."""

    inode: int
    start: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Names:
    """One change of a directory, which is seen whole or not at all: a rename takes one name away
    and gives another.
    """

    directory: int
    gone: str = ""
    name: str = ""
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """All earlier steps of this file, or of this directory's own names, are durable."""

    inode: int
    where: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What the program said."""

    said: dict[str, Any]


Step = Data | Names | Sync | Mark


@dataclass(slots=True)
class _Open:
    """An open file description: descriptors that were copied share its offset."""

    inode: int
    offset: int = 0


@dataclass(slots=True)
class _Machine:
    """Who has what open, and what each directory holds when nothing is lost."""

    root: str
    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    open: dict[tuple[str, int], _Open] = field(default_factory=dict)
    processes: list[str] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    where: str = ""
    inodes: int = 0


def traced(work: str, root: Path) -> list[Step]:
    """Run a work of `tests.campaigns.crash_work` in the empty directory ``root``.

    The steps of it.
    """
    log = root.with_name(f"{root.name}.strace")
    program = [sys.executable, "-m", "tests.campaigns.crash_work", work, str(root)]
    strace = ["strace", "-f", "-qq", "-xx", "-s", str(1 << 24), "-o", str(log)]
    strace += ["-e", f"trace={TRACED}", "-e", "signal=none"]
    done = subprocess.run([*strace, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    machine = _Machine(str(root))
    return [step for line in log.read_text().splitlines() for step in _read(line, machine)]


def _read(line: str, machine: _Machine) -> Iterator[Step]:
    found = _CALL.fullmatch(line)
    if found is None:
        assert _OTHER.fullmatch(line), f"not understood: {line[:200]}"
        return
    pid, call, arguments, result = (
        found[1],
        found[2],
        found[3].split(", "),
        -1 if found[4] == "?" else int(found[4], 0),
    )
    # a child begins with what its parent has open; parents here wait for their children
    if pid not in machine.processes:
        if machine.processes:
            copies = {
                (pid, fd): at
                for (owner, fd), at in machine.open.items()
                if owner == machine.processes[0]
            }
            machine.open.update(copies)
        machine.processes.append(pid)
    if result < 0:
        return
    yield from _step(machine, pid, call, arguments, result)


def _step(machine: _Machine, pid: str, call: str, args: list[str], result: int) -> Iterator[Step]:
    def opened(index: int = 0) -> _Open | None:
        return machine.open.get((pid, int(args[index])))

    if call == "write" and args[0] == "1":
        yield from _marked(machine, json.loads(_bytes(args[1])))
    elif call == "openat":
        yield from _opened(machine, pid, args, result)
    elif call in ("dup", "fcntl"):
        if (source := opened()) and (call == "dup" or args[1].startswith("F_DUPFD")):
            machine.open[pid, result] = source
    elif call == "close":
        machine.open.pop((pid, int(args[0])), None)
    elif call == "lseek":
        if at := opened():
            at.offset = result
    elif call == "write":
        if at := opened():
            yield Data(at.inode, at.offset, _bytes(args[1])[:result])
            at.offset += result
    elif call == "pwrite64":
        if at := opened():
            yield Data(at.inode, int(args[3]), _bytes(args[1])[:result])
    elif call == "ftruncate":
        if at := opened():
            yield Data(at.inode, int(args[1]), None)
    elif call in ("fsync", "fdatasync"):
        if at := opened():
            yield Sync(at.inode, machine.where)
    elif call in ("mkdir", "mkdirat"):
        if way := _way(machine, pid, _with_directory(call, args)):
            yield _named(machine, *way, _new(machine, is_directory=True))
    elif call in ("unlink", "rmdir", "unlinkat"):
        if way := _way(machine, pid, _with_directory(call, args)):
            del machine.directories[way[0]][way[1]]
            yield Names(way[0], gone=way[1])
    elif call.startswith(("link", "rename")):
        yield from _moved(machine, pid, call, args)
    else:
        assert not args[0].isdigit() or opened() is None, f"{call}: not known to this simulation"


def _marked(machine: _Machine, said: dict[str, Any]) -> Iterator[Step]:
    if "fsync" in said:
        machine.where = said["fsync"]
    else:
        yield Mark(said)


def _opened(machine: _Machine, pid: str, args: list[str], result: int) -> Iterator[Step]:
    path = _bytes(args[1]).decode()
    if path == machine.root:
        machine.open[pid, result] = _Open(0)
    elif path.startswith("/proc/self/fd/"):  # the same file once more
        if same := machine.open.get((pid, _number(path.rpartition("/")[2]))):
            machine.open[pid, result] = _Open(same.inode)
    elif way := _way(machine, pid, args):
        directory, name = way
        if name not in machine.directories[directory]:
            yield _named(machine, directory, name, _new(machine))
        machine.open[pid, result] = _Open(machine.directories[directory][name])
        assert "O_TRUNC" not in args[2], "not known to this simulation"


def _moved(machine: _Machine, pid: str, call: str, args: list[str]) -> Iterator[Step]:
    """A link or a rename."""
    args = args if "at" in call else [_HERE, args[0], _HERE, args[1]]
    before, after = _way(machine, pid, args), _way(machine, pid, args[2:])
    if before and after:
        inode = machine.directories[before[0]][before[1]]
        if call.startswith("link"):
            yield _named(machine, *after, inode)
            return
        assert before[0] == after[0], (
            "a rename into another directory: not known to this simulation"
        )
        del machine.directories[before[0]][before[1]]
        machine.directories[after[0]][after[1]] = inode
        yield Names(before[0], before[1], after[1], inode)


def _with_directory(call: str, args: list[str]) -> list[str]:
    return args if call.endswith("at") else [_HERE, *args]


def _way(machine: _Machine, pid: str, args: list[str]) -> tuple[int, str] | None:
    """The directory and the name in it that a descriptor and a path mean, if that is beneath the
    root.
    """
    path = _bytes(args[1]).decode()
    if path.startswith(f"{machine.root}/"):
        at, path = 0, path.removeprefix(f"{machine.root}/")
    elif path.startswith("/") or (found := machine.open.get((pid, _number(args[0])))) is None:
        return None
    else:
        at = found.inode
    *way, name = path.split("/")
    for part in way:
        at = machine.directories[at][part]
    return at, name


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _named(machine: _Machine, directory: int, name: str, inode: int) -> Names:
    machine.directories[directory][name] = inode
    return Names(directory, name=name, inode=inode)


def _new(machine: _Machine, *, is_directory: bool = False) -> int:
    machine.inodes += 1
    if is_directory:
        machine.directories[machine.inodes] = {}
    return machine.inodes


def _bytes(text: str) -> bytes:
    assert text.startswith('"'), f"not a string: {text[:80]}"
    assert text.endswith('"'), f"cut short: {text[-80:]}"
    return bytes.fromhex(text[1:-1].replace("\\x", ""))
