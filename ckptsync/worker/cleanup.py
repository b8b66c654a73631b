"""Removes from this node what is VERIFIED in the store: pins and, if configured, checkpoints.

Where nobody rotates, the trainer's disk fills up.  A local checkpoint is removed only if a report
proves that the store has every byte of it: sizes and times can be kept while bytes change, so a
file is read again unless its inode and ctime are those that were uploaded.  The newest checkpoint,
the trainer's best one, and one with an open file stay.  A checkpoint is removed by one rename, so
that no trainer sees half of it; if it changed at that moment, it is renamed back.

Checkpoints that `ckptsync resume` has moved aside are removed, too, once a later checkpoint is here
and VERIFIED.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.checkpoint_dirs import ASIDE, CheckpointDir, list_aside, series_and_step
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.plain_json import parse
from ckptsync.records import manifest_groups
from ckptsync.records.manifest import Manifest
from ckptsync.records.save_order import SaveDates, oldest_first
from ckptsync.records.upload_decision import find_holder
from ckptsync.spool.pins import clean_abandoned, drop, list_pins
from ckptsync.spool.safe_files import list_names_in, remove_in, translate_errors
from ckptsync.stores import progress_signs
from ckptsync.tensors import read_whole
from ckptsync.walk import (
    SPOOL,
    Listing,
    Stat,
    is_private_directory,
    opened_directory,
    opened_parent,
    walk,
)
from ckptsync.worker.local_save import (
    AfterChunk,
    LocalFile,
    LocalFiles,
    ignore_chunk,
    open_each,
    remove_manifest_copies,
)
from ckptsync.worker.observation import has_lease
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.results import Failure, UploadProgress, describe_failure
from ckptsync.worker.scanner import ScannedSave, Scanner
from ckptsync.worker.spool_room import local_dates, pins_by_age
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.torn_saves import TRAINER_STATE
from ckptsync.worker.upload_sources import UploadSource

_GONE = ".gone-cleaned-"


class UploadedFiles:
    """Remembers files of this node that have, or have not, the bytes that the store has.

    They are identified by all that `stat` says; after a restart none is known.  ``after_chunk``:
    gets the bytes of each chunk that is read to compare.
    """

    def __init__(self, after_chunk: AfterChunk = ignore_chunk) -> None:
        """Begin with no file remembered."""
        self._after_chunk = after_chunk
        self._same: dict[str, set[_Identity]] = {}
        self._changed: dict[str, set[_Identity]] = {}

    def note(self, checkpoint: str, files: Iterable[Stat]) -> None:
        """Remember that these files of a checkpoint, and no others of it, are as in the store."""
        self._same[checkpoint] = {_identity(f) for f in files}

    def forget(self, checkpoints: Collection[str]) -> None:
        """Forget the files of all other checkpoints than these."""
        for identities in (self._same, self._changed):
            for checkpoint in identities.keys() - set(checkpoints):
                identities.pop(checkpoint, None)

    def find_changed(
        self, checkpoint: str, root: Path, files: Iterable[tuple[Stat, str]]
    ) -> str | None:
        """Return the path of the first file that does not have its digest, or None if all have.

        Files known to differ come first.  Reads files that are not remembered, and remembers
        whether they differ.  Raises Incomplete if one changes meanwhile, StoreError.
        """
        same, changed = self._same.get(checkpoint, set()), self._changed.get(checkpoint, set())
        for file, digest in sorted(
            files, key=lambda file_and_digest: _identity(file_and_digest[0]) not in changed
        ):
            if _identity(file) in same:
                continue
            if _identity(file) in changed:
                return file.path
            local_file = LocalFile(file, root, is_pinned=False)
            if UploadSource(local_file, "", after_chunk=self._sign).digested().digest != digest:
                self._changed.setdefault(checkpoint, set()).add(_identity(file))
                return file.path
            self._same.setdefault(checkpoint, set()).add(_identity(file))
        return None

    def _sign(self, count: int) -> None:
        """Signal progress to the watchdog, and pass the bytes of a chunk on."""
        progress_signs.sign()
        self._after_chunk(count)


_Identity = tuple[str, int, int, int, int, int]


def _identity(file: Stat) -> _Identity:
    """Return what identifies one state of a file."""
    return file.path, file.size, file.mtime, file.inode, file.device, file.ctime


def clean_up(
    checkpoints: Collection[str],
    options: WorkerOptions,
    view: StoreView,
    scanner: Scanner,
    uploaded: UploadedFiles,
) -> tuple[list[UploadProgress], list[Failure]]:
    """Remove the pins, and with ``clean`` the local checkpoints, that are not needed any more.

    Return the removed checkpoints, and what could not be removed; the first error of a disk or the
    store ends the call.  The newest ``keep_pins`` proven pins of this node stay.  Pins that other
    nodes left half done are removed or published.  ``checkpoints``: names that are here or that
    the scan could not read.  Manifest copies of all others are removed, and ``uploaded`` forgets
    them, unless the empty name is among them: then the scan saw nothing.
    """
    run, scanned_saves = options.run, scanner.saves()
    cleaned: list[UploadProgress] = []
    failures: list[Failure] = []
    try:
        clean_abandoned(run.path, time.time())
        if "" not in checkpoints:
            remove_manifest_copies(
                run.path,
                {*checkpoints, *(scanned.local_save.checkpoint for scanned in scanned_saves)},
            )
            uploaded.forget(
                {*checkpoints, *(scanned.local_save.checkpoint for scanned in scanned_saves)}
            )
        if options.clean == "verified":  # before the pins go, since that changes files' ctimes
            task = _CleanUp(run, view, scanner, uploaded, failures)
            cleaned.extend(_clean_checkpoints(task, scanned_saves, options.keep_local))
        own_pins = [
            (scanned.local_save, scanned.local_save.pin)
            for scanned in scanned_saves
            if scanned.local_save.pin and scanned.local_save.pin.node == options.node
        ]
        proven = pins_by_age(
            pin
            for local_save, pin in own_pins
            if view.is_proven(local_save.checkpoint, local_save.files.stats)
        )
        for pin in proven[::-1][options.keep_pins :]:
            drop(pin, scanner.lock)
    except CkptsyncError as e:
        failures.append(describe_failure(run.name, "", e))
    return cleaned, failures


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint's directory on this node.

    ``is_verified``: a report has proven that the store has every file of it, as it is now.
    ``age``: its step, and the mtime of its last file (ns).  ``is_busy``: some of it is still to be
    sent. ``finished``: when a worker saw it finished (ns), 0 if none has.
    """

    name: str
    age: tuple[int, int]
    is_verified: bool
    is_busy: bool
    finished: int = 0

    @property
    def dates(self) -> SaveDates:
        """Return the dates by which the checkpoint is ordered among others."""
        return local_dates(self.name, self.age[1], self.finished)


def choose_cleanable(
    checkpoints: Iterable[LocalCheckpoint], best: Collection[str], keep: int
) -> tuple[str, ...]:
    """Return the names of the verified checkpoints that may be removed, oldest first.  Pure.

    The newest ``keep`` (at least one) stay, by `oldest_first`, by step and by time.  So do those of
    ``best``, busy ones, and all that are not older than each busy one both by step and by time.
    """
    by_dates = oldest_first(checkpoints, lambda checkpoint: checkpoint.dates)
    orders = (
        by_dates,
        *(sorted(by_dates, key=lambda checkpoint: checkpoint.age[position]) for position in (0, 1)),
    )
    newest = {local.name for order in orders for local in order[-max(1, keep) :]}
    busy = [local.age for local in by_dates if local.is_busy]
    return tuple(
        local.name
        for local in by_dates
        if local.is_verified
        and not local.is_busy
        and local.name not in newest
        and local.name not in best
        and all(local.age[0] < age[0] and local.age[1] < age[1] for age in busy)
    )


def is_superseded(aside: LocalCheckpoint, checkpoints: Iterable[LocalCheckpoint]) -> bool:
    """Return whether a VERIFIED checkpoint here is later than ``aside``, which was moved aside.

    Pure.  Later: of the same series, with a greater step, and written after it.  A checkpoint that
    is in use does not count, and nothing supersedes a name without a step.
    """
    series, step = series_and_step(aside.name)
    return step is not None and any(
        local.is_verified
        and not local.is_busy
        and series_and_step(local.name)[0] == series
        and local.age[0] > step
        and local.age[1] > aside.age[1]
        for local in checkpoints
    )


@dataclass(frozen=True, slots=True)
class _CleanUp:
    """What the removal of checkpoints needs; ``failures`` gets what could not be removed."""

    run: RunDir
    view: StoreView
    scanner: Scanner
    uploaded: UploadedFiles
    failures: list[Failure]


def _clean_checkpoints(
    task: _CleanUp, scanned_saves: Sequence[ScannedSave], keep: int
) -> Iterator[UploadProgress]:
    """Remove local checkpoints that are not needed; yield each one removed, lazily.

    First removes what a killed worker left, and checkpoints that were moved aside.  Other errors
    than StoreError, which is raised, are added to ``task.failures``.  ``keep``: how many newest
    ones stay at least.
    """
    run = task.run
    try:
        remove_leftovers(run.path)
    except ConfigError as e:
        task.failures.append(describe_failure(run.name, "", e))
    scanned_by_name = {
        scanned.local_save.checkpoint: scanned
        for scanned in scanned_saves
        if scanned.local_save.checkpoint_dir.only is None and not scanned.local_save.files.is_gone
    }
    best_dir_names = {
        _best_checkpoint(scanned.local_save.files) for scanned in scanned_by_name.values()
    }
    # a trial's, too, whose name is a longer one
    best_checkpoints = [
        name
        for name, scanned in scanned_by_name.items()
        if scanned.local_save.checkpoint_dir.path.name in best_dir_names
    ]
    local_checkpoints: list[LocalCheckpoint] = []
    for name, scanned in scanned_by_name.items():
        files = scanned.local_save.files
        age = (
            scanned.local_save.checkpoint_dir.step or 0,
            max((s.mtime for s in files.stats), default=0),
        )
        is_busy = scanned.observation is not None or bool(files.partial)
        is_verified = (
            not files.special_paths and _verified_manifest(name, files.stats, task.view) is not None
        )
        finished = scanned.local_save.pin.notes.finished if scanned.local_save.pin else 0
        local_checkpoints.append(LocalCheckpoint(name, age, is_verified, is_busy, finished))
    yield from _clean_aside(task, local_checkpoints)
    for name in choose_cleanable(local_checkpoints, best_checkpoints, keep):
        try:
            size = _remove_checkpoint(task, scanned_by_name[name].local_save.checkpoint_dir)
        except (ConfigError, Incomplete, Corrupt) as e:
            # somebody else's directory, one that the trainer has just removed, or changed bytes
            task.failures.append(describe_failure(run.name, name, e))
            continue
        if size is not None:
            yield UploadProgress(
                run.name, name, 0, "cleaned", "the store has it, VERIFIED", size=size
            )


def _clean_aside(
    task: _CleanUp, local_checkpoints: Sequence[LocalCheckpoint]
) -> Iterator[UploadProgress]:
    """Remove the checkpoints that were moved aside and are superseded; yield each one removed.

    One with an open file stays.  What cannot be removed is added to ``task.failures``.
    """
    folder = task.run.path / ASIDE
    for name, (checkpoint, files) in list_aside(task.run.path).items():
        age = (0, max(f.mtime for f in files))
        if not is_superseded(
            LocalCheckpoint(checkpoint, age, is_verified=False, is_busy=False), local_checkpoints
        ):
            continue
        try:
            if is_open(folder if files[0].path == name else folder / name, files):
                continue
            with translate_errors(folder), opened_directory(folder) as fd:
                # by one rename, so that nobody takes back a half of it
                os.rename(name, f"{_GONE}{name}", src_dir_fd=fd, dst_dir_fd=fd)
                remove_in(fd, f"{_GONE}{name}")
        except (ConfigError, Incomplete, StoreError) as e:
            task.failures.append(describe_failure(task.run.name, f"{ASIDE}/{name}", e))
            continue
        why = "moved aside before; a later checkpoint is VERIFIED"
        size = sum(f.size for f in files)
        yield UploadProgress(task.run.name, f"{ASIDE}/{name}", 0, "cleaned", why, size=size)


def _remove_checkpoint(task: _CleanUp, checkpoint_dir: CheckpointDir) -> int | None:
    """Remove a checkpoint with its proven pins; return its bytes, or None if it stays.

    It stays if it has unfinished or special files, an open file, or changes meanwhile, or if the
    store, whose records are read again, does not list all of it, VERIFIED.  Raises Corrupt where a
    file does not have the bytes that the store has; ConfigError, Incomplete, StoreError.
    """
    name, root, view = checkpoint_dir.name, checkpoint_dir.path, task.view
    listing = walk(root)
    if listing.partial or listing.others:
        return None
    digests = _listed_digests(name, listing.files, view)
    if digests is None or is_open(root, listing.files):
        return None
    if path := task.uploaded.find_changed(name, root, zip(listing.files, digests, strict=True)):
        raise Corrupt(
            f"{root}/{path}: its bytes are not those in the store, although its size and time are:"
            " the checkpoint is not removed",
            hint="`touch` the file, and the worker uploads the checkpoint as another save",
        )
    if not remove_by_rename(task.run.path, checkpoint_dir, listing):
        return None
    for pin in list_pins(task.run.path):
        if (pin.checkpoint, pin.node) == (name, view.node) and view.is_proven(name, pin.files):
            drop(pin, task.scanner.lock)
    return sum(f.size for f in listing.files)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed worker had renamed in order to remove it.

    Raises StoreError or ConfigError where the disk refuses.
    """
    for folder in (output_dir / SPOOL, output_dir / ASIDE, output_dir):
        with (
            contextlib.suppress(Incomplete),
            translate_errors(folder),
            opened_directory(folder) as fd,
        ):
            leftovers = [name for name in list_names_in(fd) if name.startswith(_GONE)]
            if leftovers and folder == output_dir:
                _check_alone(fd, folder)
            for name in leftovers:
                remove_in(fd, name)


def is_open(root: Path, files: Iterable[Stat]) -> bool:
    """Return whether a process of this machine has one of the files open, also for reading.

    False where the file system grants no leases: a write lease is refused while a file is open.
    """
    return any(
        has_lease(fd, fcntl.F_WRLCK) is False
        for _, fd in open_each(LocalFile(f, root, is_pinned=False) for f in files)
    )


def _verified_manifest(checkpoint: str, files: Sequence[Stat], view: StoreView) -> Manifest | None:
    """Return this node's manifest of all of these files, if its location is VERIFIED; else None.

    Files that are not sent by choice must be in it, too.  None also if the location is given up, or
    one of its records cannot be read.
    """
    records = view.run_records
    own_manifests = [m for m in records.live_manifests(checkpoint) if m.node == view.node]
    manifest = find_holder(files, view.node, own_manifests)
    # a newer head's record, or a damaged report, may say otherwise
    if manifest is None or records.is_unreadable(manifest.location):
        return None
    return manifest if records.is_safe(manifest.location, retired_too=False) else None


def _listed_digests(checkpoint: str, files: Sequence[Stat], view: StoreView) -> list[str] | None:
    """Return each file's digest, if this node's manifest of the files is VERIFIED; else None.

    None also if the store does not list each of them now, with its size.  Refreshes the view.
    Raises StoreError.
    """
    records = view.refresh()
    manifest = _verified_manifest(checkpoint, files, view)
    if manifest is None:
        return None
    manifests = (stored.manifest for stored in records.live_manifests_in(manifest.location))
    located = {
        path: stored_file
        for path, stored_files in manifest_groups.locate_files(manifests).items()
        for stored_file in stored_files
        if view.node in stored_file.nodes
    }
    sizes = dict(records.sizes) | {
        e.name: e.size for e in view.store.names(f"{view.run}/{manifest.location}/")
    }
    if not all(f.path in located and sizes.get(located[f.path].name) == f.size for f in files):
        return None
    return [located[f.path].entry.digest for f in files]


def remove_by_rename(output_dir: Path, checkpoint_dir: CheckpointDir, listing: Listing) -> bool:
    """Remove a checkpoint by one rename; return False if it is not ``listing``, and so stays.

    It is renamed into the spool, or within the output directory if the spool is another file
    system, and deleted there, or renamed back.  Raises ConfigError where other users could replace
    it meanwhile, StoreError or Incomplete.
    """
    aside = f"{_GONE}{checkpoint_dir.name}"
    with (
        translate_errors(checkpoint_dir.path),
        opened_parent(output_dir, str(checkpoint_dir.path.relative_to(output_dir))) as (
            source,
            name,
        ),
    ):
        for folder in (output_dir / SPOOL, output_dir):
            with opened_directory(folder) as fd:
                try:
                    if folder == output_dir:
                        _check_alone(fd, folder)
                    # out of the trainer's sight, by one rename
                    os.rename(name, aside, src_dir_fd=source, dst_dir_fd=fd)
                except OSError as e:
                    if e.errno != errno.EXDEV or folder == output_dir:
                        raise
                    continue  # the spool is another file system
                now = walk(folder / aside)
                if now != listing or any(map(Stat.was_touched, listing.files, now.files)):
                    os.rename(aside, name, src_dir_fd=fd, dst_dir_fd=source)
                    return False
                remove_in(fd, aside)
                return True
    raise AssertionError("the last folder returns or raises")


def _check_alone(fd: int, folder: Path) -> None:
    """Raise ConfigError for an open directory in which the group or other users may write."""
    if not is_private_directory(os.fstat(fd), fd) or os.fstat(fd).st_mode & stat.S_IWGRP:
        raise ConfigError(
            f"{folder}: other users may write there, and the spool is on another file system:"
            " ckptsync deletes no checkpoint",
            hint=f"chmod go-w {folder}, or set worker.clean: off",
        )


def _best_checkpoint(files: LocalFiles) -> str:
    """Return the name of the trainer's best directory; empty if its state names none or is torn."""
    if TRAINER_STATE in files.by_path:
        with contextlib.suppress(CkptsyncError, AttributeError):  # torn: it is not removed either
            best = parse(read_whole(files, TRAINER_STATE), TRAINER_STATE).get(
                "best_model_checkpoint"
            )
            return Path(best).name if isinstance(best, str) else ""
    return ""
