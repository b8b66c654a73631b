"""Remove from this node what the store has, VERIFIED: pins that nobody needs, and, if the operator wants it, local checkpoints.

Local checkpoints are removed for nodes on which nobody rotates.  Never the newest, never what the trainer calls its best, never what a process has
open, and nothing of which the store lacks a byte that lies here.  A checkpoint goes by one rename, so that no trainer sees half of one; if it changed in
that moment, it comes back by another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.model import read_whole
from ckptsync.parsing import parse
from ckptsync.records import saves
from ckptsync.records.manifest import Manifest
from ckptsync.scan import Spot
from ckptsync.spool import pins as spool
from ckptsync.spool.folders import names_in, refusals, remove_in
from ckptsync.spool.sweeping import tidy
from ckptsync.walk import OURS, Listing, Stat, is_kept, open_directory, opened_parent, walk
from ckptsync.worker import plan
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.remembering import forget, remember
from ckptsync.worker.result import Failure, Progress, failure
from ckptsync.worker.scanner import Scanned, Scanner
from ckptsync.worker.snapshot import Held, Hold, each_open
from ckptsync.worker.store_view import StoreView, is_safe
from ckptsync.worker.torn_saves import TRAINER_STATE

_GONE = ".gone-cleaned-"


def clean_up(
    run: RunDir, here: Collection[str], options: WorkerOptions, view: StoreView, scanner: Scanner
) -> tuple[list[Progress], list[Failure]]:
    """Remove after each plan what is not needed; return what a user should see of it, and what could not be removed.

    ``here``: checkpoints that the last scan saw, and that it could not look at; with the empty name it saw none.
    """
    scanned = [one for one in scanner.saves() if one.seen.run == run.name]
    gone: list[Progress] = []
    wrong: list[Failure] = []
    try:
        tidy(run.path, time.time())
        if "" not in here:
            forget(run.path, {*here, *(one.seen.spot.name for one in scanned)})
        _drop_pins(run, scanned, options, view, scanner)
        if options.clean == "verified":
            for name, found in clean(run, scanned, view, scanner, options.keep_local):
                if isinstance(found, CkptsyncError):
                    wrong.append(failure(run.name, name, found))
                else:
                    gone.append(Progress(run.name, name, 0, "cleaned", "the store has it, VERIFIED", files=0, size=found))
    except CkptsyncError as e:
        wrong.append(failure(run.name, "", e))
    return gone, wrong


def _drop_pins(run: RunDir, scanned: Sequence[Scanned], options: WorkerOptions, view: StoreView, scanner: Scanner) -> None:
    """Drop pins whose files are VERIFIED in the store, but for the newest ``keep_pins``."""
    saves_here = [one.seen for one in scanned]
    there = {s.spot.name for s in saves_here if not s.hold.gone}
    ours = [(s, s.pin) for s in saves_here if s.pin is not None and s.pin.node == options.node]
    proven = [pin for s, pin in ours if view.is_proven(run.name, s.spot.name, s.hold.stats)]
    for pin in proven[: max(0, len(proven) - options.keep_pins)]:
        if pin.checkpoint in there:
            with contextlib.suppress(StoreError):  # a full spool: the pin's room is worth more than what would be kept
                remember(run.path, pin)
        spool.drop(pin, scanner.lock)


@dataclass(frozen=True, slots=True)
class Local:
    """A checkpoint's directory here.  ``is_verified``: a report has proven in the store every file of it, as it is now.

    ``age``: its step, and the mtime of its last file (ns).  ``is_busy``: something of it is still on its way.
    """

    name: str
    age: tuple[int, int]
    is_verified: bool
    is_busy: bool


def cleanable(there: Iterable[Local], best: Collection[str], keep: int) -> tuple[str, ...]:
    """Names that may go, oldest first: not the newest ``keep``, at least one, by step or by time, and none that is younger than a busy one.  Pure."""
    every = list(there)
    newest = {local.name for at in (0, 1) for local in sorted(every, key=lambda one: one.age[at])[-max(1, keep) :]}
    busy = [local.age for local in every if local.is_busy]
    return tuple(
        local.name
        for local in sorted(every, key=lambda one: one.age)
        if local.is_verified
        and not local.is_busy
        and local.name not in newest
        and local.name not in best
        and all(local.age[0] < age[0] and local.age[1] < age[1] for age in busy)
    )


def clean(
    run: RunDir, scanned: Sequence[Scanned], view: StoreView, scanner: Scanner, keep: int
) -> Iterator[tuple[str, int | CkptsyncError]]:
    """Remove them; each name with its bytes when it is gone, or with why it could not go, which keeps no other back.  Raises StoreError."""
    try:
        sweep(run.path)
    except ConfigError as e:
        yield "", e
    here = {w.seen.spot.name: w for w in scanned if w.seen.spot.only is None and not w.seen.hold.gone}
    said = {name for w in here.values() for name in _best(w.seen.hold)}
    best = [name for name, w in here.items() if w.seen.spot.path.name in said]  # a trial's, too, whose name is a longer one
    for name in cleanable([_local(w, view) for w in here.values()], best, keep):
        try:
            size = _cleaned(run, here[name].seen.spot, view, scanner)
        except (ConfigError, Incomplete) as e:  # somebody else's directory, or one that the trainer has just removed
            yield name, e
            continue
        if size is not None:
            yield name, size


def _cleaned(run: RunDir, spot: Spot, view: StoreView, scanner: Scanner) -> int | None:
    """The bytes of what is gone, with its pins; ``None`` if it stays."""
    there = walk(spot.path)
    is_whole = not (there.partial or there.others)
    if not is_whole or not _is_listed(run.name, spot.name, there.files, view) or is_open(spot.path, there.files):
        return None
    if not removed(run.path, spot, there):
        return None
    for pin in spool.pins(run.path):
        if (pin.checkpoint, pin.node) == (spot.name, view.node) and view.is_proven(run.name, spot.name, pin.files):
            spool.drop(pin, scanner.lock)
    return sum(f.size for f in there.files)


def sweep(output_dir: Path) -> None:
    """Remove what a worker that was killed had put aside to remove."""
    for folder in (output_dir / OURS, output_dir):
        with contextlib.suppress(Incomplete), refusals(folder), _opened(folder) as fd:
            left = [name for name in names_in(fd) if name.startswith(_GONE)]
            if left and folder == output_dir:
                _check_alone(fd, folder)
            for name in left:
                remove_in(fd, name)


def is_open(root: Path, files: Iterable[Stat]) -> bool:
    """Whether any process of this machine has one of the files open, for reading too, as far as the file system can tell."""
    return any(_is_leased(fd) for _, fd in each_open(Held(f, root, is_pinned=False) for f in files))


def _is_leased(fd: int) -> bool:
    try:
        # a write lease is refused while anybody else has the file open; the signal as in worker.observation
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no leases here: then its age has to do
    return False


def _local(one: Scanned, view: StoreView) -> Local:
    seen = one.seen
    newest = max((s.mtime for s in seen.hold.stats), default=0)
    is_busy = one.observation is not None or bool(seen.hold.partial)
    is_verified = not seen.hold.others and _holder(seen.run, seen.spot.name, seen.hold.stats, view) is not None
    return Local(seen.spot.name, (seen.spot.step or 0, newest), is_verified, is_busy)


def _holder(run: str, checkpoint: str, files: Sequence[Stat], view: StoreView) -> Manifest | None:
    """Our manifest of all of these files, also of what is not sent by choice, if its location is VERIFIED."""
    known = view.of(run)
    live = saves.live(known.manifests(checkpoint))
    mine = plan.holder(files, view.node, [k.manifest for k in live if k.manifest.node == view.node])
    if mine is None or known.is_unreadable(mine.location):  # who knows what a newer head, or a damaged report, says
        return None
    return mine if is_safe(known, mine.location, live, retired_too=False) else None


def _is_listed(run: str, checkpoint: str, files: Sequence[Stat], view: StoreView) -> bool:
    """Whether the store says now that it has each of them, by name and size.  Raises StoreError."""
    known = view.refresh(run)
    mine = _holder(run, checkpoint, files, view)
    if mine is None:
        return False
    here = [k.manifest for k in saves.live(known.manifests(checkpoint)) if k.manifest.location == mine.location]
    located = {path: at for path, every in saves.locate(here).items() for at in every if view.node in at.nodes}
    sizes = dict(known.sizes) | {e.name: e.size for e in view.store.names(f"{run}/{mine.location}/")}
    return all(f.path in located and sizes.get(located[f.path].name) == f.size for f in files)


def removed(output_dir: Path, spot: Spot, there: Listing) -> bool:
    """Whether it is gone: it stays if it is not what was looked at, or somebody is writing a file of it."""
    aside = f"{_GONE}{spot.name}"
    with refusals(spot.path), opened_parent(output_dir, str(spot.path.relative_to(output_dir))) as (source, name):
        for folder in (output_dir / OURS, output_dir):
            with _opened(folder) as fd:
                try:
                    if folder == output_dir:
                        _check_alone(fd, folder)
                    os.rename(name, aside, src_dir_fd=source, dst_dir_fd=fd)  # out of the trainer's sight, by one rename
                except OSError as e:
                    if e.errno != errno.EXDEV or folder == output_dir:
                        raise
                    continue  # the spool is another file system
                if walk(folder / aside) != there:
                    os.rename(aside, name, src_dir_fd=fd, dst_dir_fd=source)
                    return False
                remove_in(fd, aside)
                return True
    raise AssertionError("the last folder returns or raises")


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = open_directory(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_alone(fd: int, folder: Path) -> None:
    """Raises ConfigError for a directory in which others could put their own, or any other of this user's, in the location of what is to be removed."""
    if not is_kept(os.fstat(fd), fd) or os.fstat(fd).st_mode & stat.S_IWGRP:
        raise ConfigError(
            f"{folder}: others may write there, and the spool is another file system: no checkpoint is removed",
            hint=f"chmod go-w {folder}, or set worker.clean: off",
        )


def _best(hold: Hold) -> Iterator[str]:
    """The checkpoint that the trainer will load at the end."""
    if TRAINER_STATE in hold.held:
        with contextlib.suppress(CkptsyncError, AttributeError):  # torn: it is not removed either
            best = parse(read_whole(hold, TRAINER_STATE), TRAINER_STATE).get("best_model_checkpoint")
            if isinstance(best, str):
                yield Path(best).name
