"""Which process this is, among those that train, and where they write."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.hooks import room
from ckptsync.hooks.trials import place
from ckptsync.scan import spots
from ckptsync.spool import folders, marks
from ckptsync.spool.folders import children
from ckptsync.spool.marks import Begun
from ckptsync.walk import OURS

_HALF_DONE = re.compile(r"\.(?:new|gone)-hook-([0-9]+)-")  # `ckptsync.hooks.pinning`, `ckptsync.hooks.room`
_FORGOTTEN_AFTER = 30 * 24 * 3600.0  # seconds: a process of another machine, of which nobody here can tell whether it lives


@dataclass(frozen=True, slots=True)
class Here:
    """One rank.  ``has_state``: it writes ``trainer_state.json`` (rank 0, or the first of a node); ``only_model``: no states of ranks."""

    output_dir: Path
    rank: int
    world: int
    has_state: bool
    only_model: bool
    trainer: str = ""

    @property
    def spool(self) -> Path:
        """Where pins and marks lie."""
        return self.output_dir / OURS


def introduce(here: Here, facts: Mapping[str, str], process: str = "", marked: str = "all") -> Begun:
    """Say in the spool that this process begins to train, and which of its saves it will mark (`Begun`).  Raises OSError."""
    pid = os.getpid()
    begun = Begun(
        *(
            "",
            here.rank,
            here.world,
            0,
            socket.gethostname(),
            pid,
            marks.began(pid),
            marks.boot(),
            time.time(),
            here.trainer,
            facts,
        ),
        process=process or secrets.token_hex(8),
        machine=marks.machine(),
        marks=marked,
    )
    forget_the_dead(here.spool)
    marks.write_mark(marks.begun_path(here.spool, begun.process), begun)
    return begun


def neighbours(spool: Path, mine: Begun, words: Sequence[str]) -> tuple[int, ...]:
    """The ranks that write into this very directory, whatever machines they run on: those whose introduction is seen in it.

    A word is a process and its host.  If somebody deleted our own introduction, he deleted theirs, too: then the host decides.
    """
    is_whole = _is_said(spool, mine.process)
    told = [word.partition(" ") for word in words]
    return tuple(
        rank
        for rank, (process, _, host) in enumerate(told)
        if rank == mine.rank or _is_said(spool, process) or (not is_whole and host == mine.host)
    )


def _is_said(spool: Path, process: str) -> bool:
    """Whether that process has introduced itself here."""
    return folders.status(marks.begun_path(spool, process)) is not None


def forget_the_dead(spool: Path) -> None:
    """Remove what trainings that are over said here.  Raises OSError where the spool cannot be written."""
    added = children(spool / "added")  # before the living are asked: who adds something has said before that he lives
    living = set()
    alive, gone = {os.getpid()}, set[int]()
    for begun in marks.begun(spool):
        running = marks.is_running(begun)
        if running is False or (running is None and time.time() - begun.at > _FORGOTTEN_AFTER):
            folders.unlink(marks.begun_path(spool, begun.process))
        else:
            living |= {begun.train, begun.process}  # rank 0's process names the training
        is_gone = marks.is_running(replace(begun, left=0.0)) is False  # who has left may copy, and train again
        (gone if is_gone else alive).add(begun.pid)
    for folder in added:
        if folder.name not in living:
            room.forget(folder)  # pins have names of their own for what they need
    _sweep(spool, gone - alive)
    forget_saves(spool)


def _sweep(spool: Path, gone: Collection[int]) -> None:
    """Delete what processes left that were killed while they copied: as much as a save each, for which a file system wants seconds."""
    named = ((path, _HALF_DONE.match(path.name)) for path in children(spool / "pins"))
    left = [path for path, of in named if of and int(of[1]) in gone]
    if left:
        threading.Thread(target=_remove, args=(left,), name="ckptsync-remove").start()


def _remove(left: Collection[Path]) -> None:
    for folder in left:
        room.forget(folder)


def forget_saves(spool: Path) -> None:
    """Remove the marks of saves that are neither on the disk nor pinned any more."""
    pinned = {path.name.rpartition(".")[0] for path in children(spool / "pins")}
    marked = {folder: folder.name.rpartition("@")[0] for folder in children(spool / "saves")}
    gone = {folder: name for folder, name in marked.items() if name not in pinned and not place(spool.parent, name).exists()}
    there = _checkpoints(spool.parent, gone.values()) if gone else ()
    for folder, name in gone.items():
        if name not in there:
            room.forget(folder)


def _checkpoints(output_dir: Path, names: Collection[str]) -> Collection[str]:
    """Those that lie there, however deep; all of ``names`` where nobody can say."""
    try:
        return {spot.name for spot in spots(output_dir)}
    except (CkptsyncError, ImportError):  # a directory of somebody else's; a name that wants a library that is not here
        return names
