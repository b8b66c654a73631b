"""Makes this node's pins follow what the trainer's directories hold.

Rotation, another save and a killed trainer look alike for a moment.  `follow_source` decides, of
names and inodes alone, whether the pin grows, stays, or a new one is created; `Pinner` carries it
out, quickly, and safe to repeat at any moment.  `spool_room` says which pins are dropped when the
spool is full.

`PinCopies` has the files that cannot be linked, where the spool is another file system, or one
without links.  From the first scan on such a file is kept open, so that rotation removes its name
and not its bytes.  A thread copies it after a second without a change, or after rotation has
removed its name: a scan never waits for bytes.  A copy appears whole, with the file's time, or not
at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsync import checkpoint_dirs
from ckptsync.checkpoint_dirs import CheckpointDir, ListedCheckpoint
from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.spool.pins import (
    Pin,
    adopt,
    compare,
    create_pin,
    drop,
    free_bytes,
    link_files,
    list_pins,
    renew_ownership,
    unlink_files,
)
from ckptsync.spool.safe_files import Tree, copy_bytes, create_copy, is_folder, translate_errors
from ckptsync.threads import start_thread
from ckptsync.walk import Stat, open_checkpoint_file, stat_open
from ckptsync.worker.local_save import LocalSave, build_local_save
from ckptsync.worker.options import RunDir
from ckptsync.worker.results import Failure, describe_failure
from ckptsync.worker.spool_room import (
    PinCost,
    Relief,
    SpoolRoom,
    SpoolRule,
    choose_to_give_up,
    held_bytes,
)

STILL = 1.0  # seconds without a change
_MOST = 256  # files open at once; a process may often have no more than 1024
_Name = tuple[Path, str]

# How pins follow their source.


@dataclass(frozen=True, slots=True)
class PinChanges:
    """How the pins of a checkpoint change.

    ``drop``: pins to delete.  ``new_k``: the number of a pin to create with all files of the
    source; None: none is created.  ``unlinked`` and ``linked``: names to remove from, and to add
    to, the newest pin.
    """

    drop: tuple[Pin, ...] = ()
    new_k: int | None = None
    unlinked: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


def follow_source(listing: ListedCheckpoint | None, pins: Iterable[Pin], node: str) -> PinChanges:
    """Return how this node's pins of one checkpoint change to follow its source.  Pure.

    A pin holds one save.  If a name stands for another file than before, the trainer is saving
    again: a new pin is created, and the old one stays if it was found finished, and else is
    dropped.  If no file is the same, the directory was removed and made again, and the old pin
    stays: it may be a whole save that rotation removed.  A pin that the hook committed is whole: it
    neither grows nor shrinks, and this node's earlier pins of the same save are dropped.  Nothing
    else changes if the source has no files, or the newest pin is another node's.  Names that are
    gone leave the pin only if a new name has come: then the trainer, not rotation, removed them.
    """
    ordered_pins = sorted(pins, key=lambda p: p.k)
    overtaken = tuple(p for p in ordered_pins if p.node == node and _is_overtaken(p, ordered_pins))
    newest = ordered_pins[-1] if ordered_pins else None
    if listing is None or not listing.files or (newest and newest.node != node):
        return PinChanges(drop=overtaken)
    if newest is None:
        return PinChanges(new_k=0)
    difference = compare(newest.files, listing.files)
    if newest.files and not difference.same:
        return PinChanges(overtaken, new_k=newest.k + 1)
    if newest.is_committed:
        return PinChanges(
            overtaken, new_k=newest.k + 1 if difference.changed or difference.new else None
        )
    if difference.changed:
        return PinChanges(
            (*overtaken, *(() if newest.notes.finished else (newest,))), new_k=newest.k + 1
        )
    # rotation only removes: where something new stands, the trainer took the rest back (ZeRO-3's
    # placeholder of the weights)
    return PinChanges(
        overtaken, unlinked=difference.vanished if difference.new else (), linked=difference.new
    )


def _is_overtaken(pin: Pin, pins: Iterable[Pin]) -> bool:
    """Return whether a later pin of the hook's has a file of this one, made during the same save.

    A pin that was found finished, and has other files too, is another save.  A committed pin is
    never overtaken.
    """
    if pin.is_committed:
        return False
    for commit in (p for p in pins if p.k > pin.k and p.is_committed):
        relation = compare(pin.files, commit.files)
        is_part = not relation.changed and not relation.vanished
        if relation.same and (is_part or not pin.notes.finished):
            return True
    return False


def step_key(checkpoint: str) -> tuple[int, str]:
    """Return the key that sorts checkpoints by step, those without one first."""
    return CheckpointDir(checkpoint, "trainer", Path()).step or 0, checkpoint


# Copies of files that no link can hold.


@dataclass(frozen=True, slots=True)
class HeldFile:
    """An open file as the last scan saw it; ``since``: when it changed last.

    ``lost``: its name is gone.
    """

    descriptor: int
    file: Stat
    since: float
    lost: bool = False


class PinCopies:
    """The files that are to be copied into pins.  Thread-safe.

    One thread of its own copies while there is something to copy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without files and without a thread.

        ``clock``: seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._open_files: dict[_Name, HeldFile] = {}
        self._ready_names: list[_Name] = []
        self._failures: dict[_Name, str] = {}
        self._names: dict[Path, frozenset[str]] = {}
        self._thread: threading.Thread | None = None

    def keep_open(
        self, pin: Pin, source: Path, files: Iterable[Stat], refused: Collection[str]
    ) -> None:
        """Open the files that could not be linked, and note which open ones changed or vanished.

        ``files``: all files of the source now.  If a new name has come, the trainer itself removed
        the missing files, and they are closed.  At most 256 files are open, of all pins; the others
        stay unopened.  ``refused``: names that could not be linked.
        """
        files_now = {f.path: f for f in files}
        with self._lock:
            open_names = {key[1] for key in self._open_files if key[0] == pin.path}
            is_writing = bool(files_now.keys() - self._names.get(pin.path, files_now.keys()))
            self._names[pin.path] = frozenset(files_now)
            for name in open_names:
                self._notice((pin.path, name), files_now.get(name), is_writing=is_writing)
            for key in [(pin.path, name) for name in sorted(set(refused) & files_now.keys())]:
                if key not in self._open_files and len(self._open_files) < _MOST:
                    with contextlib.suppress(Incomplete):  # rotation was quicker
                        fd = open_checkpoint_file(source, key[1])
                        self._open_files[key] = HeldFile(fd, stat_open(fd, key[1]), self._clock())

    def pending(self, pin: Pin) -> tuple[Stat, ...]:
        """Return the files that rotation has removed and that no copy holds yet.

        Without them the pin is not a whole save.
        """
        with self._lock:
            return tuple(
                sorted(
                    k.file for key, k in self._open_files.items() if key[0] == pin.path and k.lost
                )
            )

    def begin(self) -> None:
        """Start the thread that copies unchanged files, unless it runs or has nothing to copy.

        Files whose names are gone come first, then small ones, if unchanged for a second.  Failed
        copies are tried again.  Raises CkptsyncError if no thread can be started.
        """
        now = self._clock()
        with self._lock:
            self._ready_names = sorted(
                (
                    key
                    for key, open_copy in self._open_files.items()
                    if open_copy.lost or now - open_copy.since >= STILL
                ),
                key=lambda key: (not self._open_files[key].lost, self._open_files[key].file.size),
            )
            if self._ready_names and self._thread is None:
                self._thread = start_thread(self._run, "copies")

    def close_dropped(self) -> None:
        """Close the files of pins that do not exist any more."""
        with self._lock:
            for key in [k for k in self._open_files if not is_folder(k[0])]:
                self._close(key)
            self._names = {path: names for path, names in self._names.items() if is_folder(path)}

    def problems(self) -> tuple[str, ...]:
        """Return why files could not be copied, each reason once; empty when they are."""
        with self._lock:
            return tuple(dict.fromkeys(self._failures.values()))

    def wait(self) -> None:
        """Wait until the thread has ended."""
        with self._lock:
            thread = self._thread
        if thread:
            thread.join()

    def _notice(self, key: _Name, file_now: Stat | None, *, is_writing: bool) -> None:
        """Note what became of an open file; close it if the trainer removed or replaced it.

        ``is_writing``: new names have come since the last scan.  Raises OSError.
        """
        open_copy = self._open_files[key]
        if file_now is None and is_writing:
            self._close(key)
        elif file_now is None:
            self._open_files[key] = replace(
                open_copy, file=stat_open(open_copy.descriptor, key[1]), lost=True
            )
        elif (file_now.device, file_now.inode) != (open_copy.file.device, open_copy.file.inode):
            self._close(key)  # another file under its name, which is opened next
        elif file_now != open_copy.file:
            self._open_files[key] = replace(open_copy, file=file_now, since=self._clock())

    def _close(self, key: _Name) -> None:
        """Close an open file and forget it."""
        os.close(self._open_files.pop(key).descriptor)
        self._failures.pop(key, None)

    def _run(self) -> None:
        """Copy the files that are ready, until none is left."""
        while True:
            with self._lock:
                if not self._ready_names:
                    self._thread = None
                    return
                key = self._ready_names.pop(0)
                open_copy = self._open_files.get(key)
                # `_close` may close the file's own descriptor while this thread copies
                descriptor = os.dup(open_copy.descriptor) if open_copy else -1
            if open_copy:
                try:
                    self._finish(key, open_copy, descriptor)
                finally:
                    os.close(descriptor)

    def _finish(self, key: _Name, open_copy: HeldFile, descriptor: int) -> None:
        """Copy one file into its pin and close it.

        It stays open if it changes meanwhile, if its pin was dropped, or if the disk refuses; the
        last is a problem (`problems`).  ``descriptor``: a duplicate for this call.
        """
        (pin, name), file = key, open_copy.file
        try:
            with (
                translate_errors(pin),
                Tree(pin / "files") as tree,
                create_copy(descriptor, pin, *tree.place(name)) as out,
            ):
                copy_bytes(descriptor, out.fileno(), file.size)
                os.utime(out.fileno(), ns=(file.mtime, file.mtime))
                stat_after = stat_open(descriptor, name)
                is_whole = stat_after.size == file.size and stat_after.mtime == file.mtime
                if not is_whole:
                    out.close()
        except Incomplete:  # the pin was dropped: the next scan lets go of the file
            return
        except CkptsyncError as e:
            # a full spool: it is reported, and tried again with the next scan
            with self._lock:
                self._failures[key] = f"not copied, rotation may delete it: {e}"
            return
        with self._lock:
            if is_whole and key in self._open_files:
                self._close(key)


# Carrying it out.


@dataclass(frozen=True, slots=True)
class Pinner:
    """Creates, changes and drops the pins of ``node``.

    ``is_proven``: whether the store has these files of a checkpoint, VERIFIED, or has given them
    up, so that they need no pin.  ``rule``: what a full spool drops.  ``lost``: the last saves that
    were lost, in words, until this worker ends.  ``copies``: files that cannot be linked.
    """

    node: str
    is_proven: Callable[[str, tuple[Stat, ...]], bool]
    rule: SpoolRule = field(default_factory=SpoolRule)
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=5), compare=False)
    copies: PinCopies = field(default_factory=PinCopies, compare=False)

    def make_room(
        self,
        run: RunDir,
        checkpoints: Collection[str],
        pins: Sequence[Pin],
        failures: list[Failure],
    ) -> Relief:
        """Drop pins until the trainer's next save has room and the operator's budget is kept.

        Return what was to be dropped, and what is still lacking.  Losses are added to ``lost``.  If
        the disk refuses, the rest stays, and the error is added to ``failures``.  ``checkpoints``:
        names in the output directory.  ``pins``: all pins, as `list_pins` orders them.  Raises
        Incomplete if the directory is gone.
        """
        largest = max((sum(f.size for f in p.files) for p in pins), default=0)
        room = SpoolRoom(held_bytes(pins), free_bytes(run.path), largest)
        if not room.lacking(self.rule):
            return Relief()
        newest = {p.checkpoint: p.k for p in pins}  # they come in order
        costs = [
            PinCost(
                pin,
                held_bytes([pin]),
                pin.checkpoint not in checkpoints or pin.k != newest[pin.checkpoint],
                self.is_proven(pin.checkpoint, pin.files),
                step_key(pin.checkpoint)[0],
            )
            for pin in pins
            if pin.node in ("", self.node)
        ]
        relief = choose_to_give_up(costs, room, self.rule)
        self.lost.extend(relief.given_up)
        try:
            for pin in relief.drop:
                drop(pin)
        except CkptsyncError as e:
            failures.append(describe_failure(run.name, "", e))
        return relief

    def pin(
        self,
        run: RunDir,
        checkpoint_dir: CheckpointDir,
        pins: list[Pin],
        failures: list[Failure],
        *,
        is_full: bool = False,
    ) -> list[LocalSave]:
        """Make the pins of one checkpoint follow its source; return its saves.

        Adopts the hook's pins, renews the ownership of this node's, and keeps files open that
        cannot be linked.  A dropped pin that a hook had committed is added to ``lost``.  A save
        whose files rotation removed before they were copied is left out until they are.
        Errors of pinning are added to ``failures``: such files can be sent from where they lie.
        ``is_full``: create no pin.  Raises as `ckptsync.checkpoint_dirs.list_checkpoint`.
        """
        listing = checkpoint_dirs.list_checkpoint(checkpoint_dir)
        if pins and not listing.files and not any(p.commit for p in pins):
            # the hook's pin comes before rotation, and rotation may have come since these were
            # listed
            pins = list(list_pins(run.path, lambda name: name == checkpoint_dir.name))
        current_pins = self._adopted(run, pins, failures)
        changes = follow_source(listing, current_pins, self.node)
        if not current_pins and self.is_proven(checkpoint_dir.name, listing.files):
            changes = PinChanges()
        if is_full:  # the operator would rather have the old ones whole
            changes = replace(changes, new_k=None)
        refused: tuple[str, ...] = ()
        try:
            refused = self._change(run, checkpoint_dir, listing, current_pins, changes)
        # a full disk, another user's files: what cannot be pinned can be sent from where it lies
        except CkptsyncError as e:
            failures.append(describe_failure(run.name, checkpoint_dir.name, e))
        if changes != PinChanges():
            current_pins = self._adopted(
                run, list_pins(run.path, lambda name: name == checkpoint_dir.name), []
            )
        for pin in current_pins:
            if pin.node == self.node:
                renew_ownership(pin)
                is_newest = pin is current_pins[-1]
                self.copies.keep_open(
                    pin,
                    checkpoint_dir.path,
                    listing.files if is_newest else (),
                    refused if is_newest else (),
                )
        lost = (pin for pin in changes.drop if pin.commit)
        self.lost.extend(
            f"{pin.checkpoint}: overwritten before it was uploaded; that save is lost"
            for pin in lost
        )
        # the newest pin goes with its source; older ones, and all of them once the source is gone,
        # stand for themselves
        newest = current_pins[-1] if current_pins else None
        saves = [build_local_save(run.name, checkpoint_dir, None, p) for p in current_pins[:-1]]
        if newest is not None or listing.files or listing.partial:
            saves.append(build_local_save(run.name, checkpoint_dir, listing, newest))
        # a pin whose files rotation took before they were copied is whole when they are, and is
        # left out until then
        return [s for s in saves if s.pin is None or not self.copies.pending(s.pin)]

    def _adopted(self, run: RunDir, pins: Iterable[Pin], failures: list[Failure]) -> list[Pin]:
        """Adopt the hook's pins that have no owner; return all pins.

        If another worker was first, the pin is returned without an owner, and the next scan shows
        it.  If the disk refuses, the error is added to ``failures``, and the pin counts as this
        node's all the same.
        """
        adopted_pins: list[Pin] = []
        for pin in pins:
            try:
                adopted_pins.append(pin if pin.node else adopt(pin, self.node) or pin)
            except CkptsyncError as e:  # noqa: PERF203
                # a full disk keeps us from saying that it is ours, not from sending it
                failures.append(describe_failure(run.name, pin.checkpoint, e))
                adopted_pins.append(replace(pin, node=self.node))
        return adopted_pins

    def _change(
        self,
        run: RunDir,
        checkpoint_dir: CheckpointDir,
        listing: ListedCheckpoint,
        pins: Sequence[Pin],
        changes: PinChanges,
    ) -> tuple[str, ...]:
        """Drop, create and change the pins; return the names that this file system cannot link.

        The newest pin is dropped last, when its successor is there.  No pin is created if another
        node was first.  Raises what `ckptsync.spool.pins` raises; the rest is then not done.
        """
        refused: tuple[str, ...] = ()
        overtaken = [
            pin for pin in changes.drop if not (changes.new_k is not None and pin is pins[-1])
        ]
        for pin in overtaken:
            drop(pin)
        if changes.new_k is not None:
            new_pin = create_pin(run.path, checkpoint_dir.name, changes.new_k, self.node)
            # there is none if another node on this directory was first
            refused = (
                link_files(new_pin, checkpoint_dir.path, [f.path for f in listing.files])
                if new_pin is not None
                else ()
            )
        if changes.unlinked:
            unlink_files(pins[-1], changes.unlinked)
        if changes.linked:
            refused = link_files(pins[-1], checkpoint_dir.path, changes.linked)
        for pin in changes.drop:
            if pin not in overtaken:  # only when its successor is there
                drop(pin)
        return refused
