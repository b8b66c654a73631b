"""The ranks of a training: which one this process is, how they learn of each other, and which of them share an output directory.

No rank calls a collective or waits for another.  Each introduces itself in the spool (``trains/<process>.json``) and leaves its
process id in the store of torch's own rendezvous.  When all ids are there, a rank looks which of these processes have
introduced themselves in the directory that it sees: those ranks write into the same directory, whatever machines they run on.
Where torch has no rendezvous, the checkpoint's files decide.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.hooks import pinning
from ckptsync.scan import spots
from ckptsync.spool import folders, marks
from ckptsync.spool.folders import children
from ckptsync.spool.marks import Begun
from ckptsync.walk import OURS

_LAUNCHERS = (  # rank and number of processes, as torchrun, DeepSpeed and accelerate, Open MPI, other MPIs and srun set them
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_UNFINISHED = re.compile(r"\.(?:new|gone)-hook-([0-9]+)-")  # `ckptsync.hooks.pinning`
_FORGET_AFTER = 30 * 24 * 3600.0  # seconds: a process of another machine, of which nobody here can tell whether it lives
_trainings = itertools.count()  # every rank begins the same trainings in the same order

Words = Callable[[], tuple[str, ...] | None]
"""Returns the introductions (`<process> <host>`) of all ranks in their order, or ``None`` while one is missing; never waits."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this process in its training.  ``can_meet``: torch's process group is there, with its rendezvous."""

    rank: int
    world: int
    can_meet: bool


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank that torch's process group has, else the launcher's variables.  Raises ConfigError if those are no numbers."""
    group = getattr(sys.modules.get("torch"), "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), can_meet=True)
    for rank, world in _LAUNCHERS:
        if world in environment:
            values = environment.get(rank, "0"), environment[world]
            if not all(map(str.isdecimal, values)):
                raise ConfigError(
                    f"{rank}={values[0]} {world}={values[1]}: not two numbers", hint="the launcher of this process sets them"
                )
            return Rank(int(values[0]), int(values[1]), can_meet=False)
    return Rank(0, 1, can_meet=False)


# --- how ranks learn of each other


def exchange(rank: int, world: int, word: str, about: str = "") -> Words:
    """Leave this rank's word in torch's rendezvous store; return a function that gives the words of all ranks.

    Once a gradient was reduced, every rank has begun, and so has left its word.  ``about``: the same on every rank
    (default: the n-th training).  Raises what torch raises if there is no process group, or its store is gone.
    """
    if world == 1:
        return lambda: (word,)
    about = about or str(next(_trainings))
    keys = [f"ckptsync/{about}/{r}" for r in range(world)]
    store = _rendezvous()
    store.set(keys[rank], word)

    def words() -> tuple[str, ...] | None:
        if not store.check(keys):
            return None
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return tuple(bytes(word).decode() for word in found)

    return words


def first_word(word: str) -> str:
    """Return what the first rank to call this has said: the same on every rank.  Raises what torch raises."""
    return bytes(_rendezvous().compare_set("ckptsync/first", "", word)).decode()


def _rendezvous() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415  # torch is the trainer's

    return _get_default_store()


# --- who writes into an output directory


def introduce(
    output_dir: Path,
    rank: int,
    world: int,
    *,
    trainer: str,
    facts: Mapping[str, str],
    process: str = "",
    marked: Literal["all", "some"] = "all",
) -> Begun:
    """Write in the spool that this process trains here, and which of its saves it will mark (`Begun.marks`).  Raises OSError."""
    spool, pid = output_dir / OURS, os.getpid()
    begun = Begun(
        train="",
        rank=rank,
        world=world,
        local_world=0,
        host=socket.gethostname(),
        pid=pid,
        began=marks.began(pid),
        boot=marks.boot(),
        at=time.time(),
        trainer=trainer,
        facts=facts,
        process=process or secrets.token_hex(8),
        machine=marks.machine(),
        marks=marked,
    )
    forget_ended(spool)
    rewrite(spool, begun)
    return begun


def rewrite(spool: Path, begun: Begun) -> None:
    """Write the introduction again, with what is known by now.  Raises OSError."""
    marks.write_mark(marks.begun_path(spool, begun.process), begun)


def withdraw(spool: Path, begun: Begun) -> None:
    """Delete the introduction: this rank will not mark its saves, so files decide.  Raises OSError."""
    folders.unlink(marks.begun_path(spool, begun.process))


def neighbours(spool: Path, mine: Begun, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that write into this output directory: those whose introduction lies in it.

    If somebody deleted our own introduction, he deleted theirs, too: then host names decide.
    """
    is_whole = _is_introduced(spool, mine.process)
    introduced = [word.partition(" ") for word in words]
    return tuple(
        rank
        for rank, (process, _, host) in enumerate(introduced)
        if rank == mine.rank or _is_introduced(spool, process) or (not is_whole and host == mine.host)
    )


def _is_introduced(spool: Path, process: str) -> bool:
    return folders.status(marks.begun_path(spool, process)) is not None


# --- cleanup of what ended trainings left in the spool


def forget_ended(spool: Path) -> None:
    """Remove what trainings that are over wrote here.  Raises OSError where the spool cannot be written."""
    added = children(spool / "added")  # listed before the introductions: a process introduces itself before it adds files
    living = set()
    alive, gone = {os.getpid()}, set[int]()
    for begun in marks.begun(spool):
        running = marks.is_running(begun)
        if running is False or (running is None and time.time() - begun.at > _FORGET_AFTER):
            folders.unlink(marks.begun_path(spool, begun.process))
        else:
            living |= {begun.train, begun.process}  # rank 0's process names the training
        is_gone = marks.is_running(replace(begun, left=0.0)) is False  # a process that left may copy, and train again
        (gone if is_gone else alive).add(begun.pid)
    for folder in added:
        if folder.name not in living:
            pinning.discard(folder)  # pins have links of their own to what they need
    _discard_unfinished(spool, gone - alive)
    forget_saves(spool)


def _discard_unfinished(spool: Path, gone: Collection[int]) -> None:
    """Delete the copies of processes that were killed, in a thread: a save each, for which a file system needs seconds."""
    named = ((path, _UNFINISHED.match(path.name)) for path in children(spool / "pins"))
    left = [path for path, of in named if of and int(of[1]) in gone]
    if left:
        threading.Thread(target=lambda: [*map(pinning.discard, left)], name="ckptsync-remove").start()


def forget_saves(spool: Path) -> None:
    """Remove the marks of saves that are neither on the disk nor pinned any more."""
    pinned = {path.name.rpartition(".")[0] for path in children(spool / "pins")}
    marked = {folder: folder.name.rpartition("@")[0] for folder in children(spool / "saves")}
    gone = {folder: name for folder, name in marked.items() if name not in pinned and not path_of(spool.parent, name).exists()}
    there = _checkpoints(spool.parent, gone.values()) if gone else ()
    for folder, name in gone.items():
        if name not in there:
            pinning.discard(folder)


def path_of(output_dir: Path, checkpoint: str) -> Path:
    """Return where a checkpoint lies, as `ckptsync.scan` names it: ``run-0.checkpoint-4`` is ``run-0/checkpoint-4``."""
    trial, _, name = checkpoint.rpartition(".")
    return output_dir / trial / name


def _checkpoints(output_dir: Path, names: Collection[str]) -> Collection[str]:
    """Return the checkpoints that lie there, however deep; all of ``names`` where nobody can say."""
    try:
        return {spot.name for spot in spots(output_dir)}
    except (CkptsyncError, ImportError):  # another user's directory; a name that wants a library that is not here
        return names
