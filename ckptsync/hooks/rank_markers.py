"""One rank's saves in one output directory: its introduction, its marks, and the pins.

A save is complete when all ranks that write into the directory have written their parts, but no
rank may wait for another.  Each rank introduces itself in the spool (``trains/<process>.json``),
and marks its part of a save when it has written it (``saves/<checkpoint>@<save>/rank-R.json``). The
last rank to mark makes the pin.  Ranks learn each other's process ids from torch's rendezvous
(`ckptsync.hooks.process_group`): those whose introduction lies in the directory that a rank sees
write there, whatever machines they run on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsync.checkpoint_dirs import find_checkpoint_dirs
from ckptsync.errors import CkptsyncError
from ckptsync.hooks.pin_checkpoint import Log, discard, pin_checkpoint
from ckptsync.spool import markers, pins, safe_files
from ckptsync.spool.markers import Commit, RankMark, TrainingProcess
from ckptsync.spool.safe_files import list_paths
from ckptsync.walk import SPOOL, Listing, walk

_log = logging.getLogger("ckptsync.hook")
_FORGET_EVERY = 64  # pins
# seconds: a process of another machine, of which nobody here can tell whether it lives
_FORGET_AFTER = 30 * 24 * 3600.0


class RankSaves:
    """One rank's saves in ``output_dir``; the constructor writes the rank's introduction there.

    It also removes what ended trainings left (`forget_ended`).  ``process``: the rank's id there
    (default: a new one).  ``marks``: whether it marks ``all`` of its saves, or ``some``
    (`TrainingProcess`).
    Methods raise OSError or one of ckptsync's errors.
    """

    def __init__(
        self,
        output_dir: Path,
        rank: int,
        world: int,
        *,
        trainer: str,
        facts: Mapping[str, str],
        log: Log,
        process: str = "",
        marks: str = "all",
    ) -> None:
        """Remove what ended trainings left, and write the introduction."""
        self.output_dir, self.spool, self._log = output_dir, output_dir / SPOOL, log
        self._counts: Counter[str] = Counter()
        self._pinned = 0
        forget_ended(self.spool)
        self.begun = TrainingProcess(
            train="",
            rank=rank,
            world=world,
            local_world=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            began=markers.start_time(os.getpid()),
            boot=markers.boot_id(),
            at=time.time(),
            trainer=trainer,
            facts=facts,
            process=process or secrets.token_hex(8),
            machine=markers.machine_id(),
            marks=marks,
        )
        self.update()

    def update(self, **changes: Any) -> None:
        """Change fields of the introduction, and write it again.  Raises OSError."""
        self.begun = replace(self.begun, **changes)
        markers.write_mark(markers.process_path(self.spool, self.begun.process), self.begun)

    def withdraw(self) -> None:
        """Delete the introduction's file: the worker then judges the saves by their files."""
        safe_files.unlink(markers.process_path(self.spool, self.begun.process))

    def writers(self, processes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that write here; ``processes``: the ids of all ranks, in their order.

        If somebody has deleted this rank's own introduction, and so perhaps the others', return
        this rank where it trains alone, else ().
        """

        def is_here(process: str) -> bool:
            """Return whether a process has introduced itself in this directory."""
            return safe_files.status(markers.process_path(self.spool, process)) is not None

        if not is_here(self.begun.process):
            return (self.begun.rank,) if self.begun.world == 1 else ()
        return tuple(rank for rank, process in enumerate(processes) if is_here(process))

    def count(self, checkpoint: str) -> int:
        """Count a save of this name; return how many there were before."""
        self._counts[checkpoint] += 1
        return self._counts[checkpoint] - 1

    def save_id(self, checkpoint: str, n: int) -> str:
        """Return the id of a save, the same on every rank; empty while the training has no name."""
        return markers.save_id(self.begun.train, checkpoint, n) if self.begun.train else ""

    def mark(self, checkpoint: str, save: str, step: int) -> None:
        """Write the mark that this rank's part of a save is written, now.  Raises OSError."""
        begun = self.begun
        host, pid = begun.host, begun.pid
        part = (begun.train, save, checkpoint, step, begun.rank, begun.world, begun.local_world)
        path = markers.save_folder(self.spool, checkpoint, save) / f"rank-{begun.rank}.json"
        markers.write_mark(path, RankMark(*part, host, pid, time.time()))

    def claim_pinning(self, checkpoint: str, save: str, writers: Iterable[int]) -> bool:
        """Claim the pinning of a save for this rank; return whether the claim is this caller's.

        False, and nothing is changed, while one of ``writers`` has not marked the save.  Else a
        file is created in the save's folder: True for the caller that created it.  Raises OSError.
        """
        folder = markers.save_folder(self.spool, checkpoint, save)
        if not all(safe_files.status(folder / f"rank-{rank}.json") for rank in writers):
            return False
        return safe_files.create(folder / "pinning")

    def is_pinned(self, checkpoint: str, listing: Listing) -> bool:
        """Return whether a pin of this name already holds these very files."""
        files = {s.path: (s.size, s.mtime) for s in listing.files}
        pinned = pins.list_pins(self.output_dir, lambda name: name == checkpoint)
        return any(p.commit and p.commit.files == files for p in pinned)

    def pin(
        self,
        path: Path,
        checkpoint: str,
        save: str,
        step: int,
        writers: tuple[int, ...],
        *,
        list_files: Callable[[Path], Listing] = walk,
        added: Path | None = None,
    ) -> None:
        """Pin a save that all ``writers`` have written, as `pin_checkpoint` does.

        With an empty ``save``, files' times tell which nodes' parts belong together.  At every
        64th pin, marks of saves that are gone are removed.  Raises as `pin_checkpoint`.
        """
        begun = self.begun
        origin = begun.host, begun.trainer, time.time()
        commit = Commit(begun.train, save, checkpoint, step, begun.world, writers, *origin, {})
        pin_checkpoint(path, self.output_dir, commit, self._log, list_files=list_files, added=added)
        self._pinned += 1
        if self._pinned % _FORGET_EVERY == 0:
            forget_saves(self.spool)


# --- cleanup of what ended trainings left in the spool


def forget_ended(spool: Path) -> None:
    """Remove introductions, added files and marks of trainings that have ended.

    A process of another machine counts as ended after 30 days.  Raises OSError or one of ckptsync's
    errors.
    """
    # listed before the introductions: a process introduces itself before it adds files
    added_folders = list_paths(spool / "added")
    running_ids = set()
    for process in markers.list_training_processes(spool):
        is_running = markers.is_training(process)
        if is_running is False or (is_running is None and time.time() - process.at > _FORGET_AFTER):
            safe_files.unlink(markers.process_path(spool, process.process))
        else:
            running_ids |= {process.train, process.process}  # rank 0's process names the training
    for folder in added_folders:
        if folder.name not in running_ids:
            discard(folder)  # pins have links of their own to what they need
    forget_saves(spool)


def forget_saves(spool: Path) -> None:
    """Remove the marks of saves that are neither in the output directory nor pinned any more.

    Does nothing if the output directory cannot be searched.  Raises as `list_paths`.
    """
    existing = {path.name.rpartition(".")[0] for path in list_paths(spool / "pins")}
    marked = {folder: folder.name.rpartition("@")[0] for folder in list_paths(spool / "saves")}
    unpinned = {*marked.values()} - existing
    existing |= {name for name in unpinned if (spool.parent / name).exists()}
    if existing.issuperset(marked.values()):
        return
    try:
        # some lie deeper
        existing |= {each.name for each in find_checkpoint_dirs(spool.parent)}
    except (CkptsyncError, ImportError):
        return  # another user's directory; a name that wants a library that is not here
    for folder, name in marked.items():
        if name not in existing:
            discard(folder)


# --- messages, and the end of the process


class HookLog:
    """Writes messages to the spool's hook.log, and the first of each kind to the trainer's log.

    ``spool`` and ``rank`` are set once they are known.  ``before``: a log whose messages count as
    written.
    """

    def __init__(self, before: HookLog | None = None) -> None:
        """Share the kinds of ``before``; write to no spool until ``spool`` is set."""
        self.spool: Path | None = None
        self.rank = 0
        self._seen: set[str] = before._seen if before else set()  # noqa: SLF001  # of one class

    def __call__(self, text: str, *, again: bool = False) -> None:
        """Append a message to the spool's log; warn in the trainer's log of the first of each kind.

        Messages are of one kind if their first 80 characters without digits are alike.  ``again``:
        warn all the same.  A spool that cannot be written is ignored.
        """
        if self.spool is not None:
            timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with contextlib.suppress(OSError, CkptsyncError):  # the spool may be what is wrong
                markers.write_log(self.spool, f"{timestamp} rank {self.rank}: {text}")
        kind = re.sub(r"[0-9]+", "", text)[:80]
        if again or kind not in self._seen:
            self._seen.add(kind)
            _log.warning("ckptsync: %s", text)


def run_at_exit(call: Callable[[], object]) -> None:
    """Call ``call`` when the script ends.

    A process that multiprocessing started (torch's ``spawn``, accelerate's ``notebook_launcher``)
    does not run `atexit`, but its own finalizers.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415  # nobody else needs it

        Finalize(None, call, exitpriority=0)
    else:
        atexit.register(call)


def has_failed() -> bool:
    """Return whether an uncaught exception ends this process; its last files may be torn then."""
    # multiprocessing's is still being raised, and torch's processes exit with 1 when they have
    # caught theirs
    now = sys.exc_info()[1]
    is_exit = now is None or (isinstance(now, SystemExit) and not now.code)
    return getattr(sys, "last_value", None) is not None or not is_exit
