"""Pins: all files of a save under a second name, published at one stroke with the statement that the save is whole.

A hard link costs some µs whatever the file's size, and rotation then removes only the trainer's own name.  Where the spool has
no links to the checkpoint (another file system), the files are opened, which keeps their bytes from rotation, and a
thread of low priority copies them beside the training.

Nobody may be there to empty the spool, so each pin leaves room for the next save: the hook gives up pins, stored and
oldest first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool import folders, marks, pins
from ckptsync.spool.folders import Tree
from ckptsync.spool.marks import Commit
from ckptsync.spool.pins import Pin
from ckptsync.walk import OURS, Listing, Stat, look, open_in, opened_parent, walk

SENTINEL = "checkpoint-is-incomplete.txt"  # the Trainer's just-in-time save removes it when it is done
COPY_THREAD = "ckptsync-copy"
FLOOR = 1.5  # saves that must fit on the disk after each pin: the trainer writes the next one before it deletes one
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_FICLONE = 0x40049409  # linux/fs.h, _IOW(0x94, 9, int)
_CHUNK = 8 * 1024 * 1024  # bytes
_open: set[int] = set()
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint to pin.  ``look`` lists its files; ``added`` is a directory of files that it may lack."""

    checkpoint: str
    path: Path
    look: Callable[[Path], Listing]
    added: Path | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """An open file that is still to be copied into a pin."""

    descriptor: int
    file: Stat


def pin(output_dir: Path, source: Source, commit: Commit, say: Say) -> None:
    """Pin a checkpoint, with its files in ``commit``.  A pin that needs copies appears when a thread has made them.

    Raises Incomplete (the trainer writes or deletes at this moment), OSError or StoreError: then there is no pin, and the worker
    judges the files.
    """
    listing = source.look(source.path)
    if any(s.path.rpartition("/")[2] == SENTINEL for s in listing.partial):
        raise Incomplete(f"{source.checkpoint}: it is still being written")
    if not listing.files:
        return  # this node has none of it
    # two of one name may be under way: the one before may still be copied
    fresh = output_dir / OURS / "pins" / f".new-hook-{os.getpid()}-{secrets.token_hex(4)}-{source.checkpoint}"
    copies: list[Copy] = []
    try:
        copies += link(source.path, listing.files, fresh)
        _check_unchanged(source, listing)
        _link_added(source.added, {s.path for s in listing.files}, fresh)
        whole = replace(commit, files={s.path: (s.size, s.mtime) for s in listing.files})
        marks.write_mark(fresh / "commit.json", whole)
        if copies:
            _in_thread(lambda: _copy_and_publish(output_dir, fresh, copies, whole, say), COPY_THREAD)
            return
        newest = pins.publish(output_dir, source.checkpoint, fresh)
    except BaseException:
        close(copies)
        discard(fresh)  # its links would hold the bytes of a save that has no pin
        raise
    _make_room_later(output_dir, newest, sum(s.size for s in listing.files), say)


def _check_unchanged(source: Source, listing: Listing) -> None:
    """Raise Incomplete if rotation, which removes one file after the other, or a writer has been here."""
    if source.look(source.path).files != tuple(listing.files):
        raise Incomplete(f"{source.checkpoint}: its files changed while they were pinned")


def _in_thread(work: Callable[[], None], name: str) -> None:
    """Run ``work`` in a thread that the interpreter's end waits for; at the interpreter's end, which waits for no new one, at once.

    Raises RuntimeError where no thread can be made.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name=name).start()
    else:
        work()


def _link_added(folder: Path | None, there: set[str], fresh: Path) -> None:
    if folder is None:
        return
    for file in walk(folder).files:
        if file.path not in there and "/" not in file.path:
            folders.make_in(fresh / "added")
            with contextlib.suppress(FileNotFoundError):  # somebody deleted it
                folders.link_or_copy(folder / file.path, fresh / "added" / file.path)


# --- links and copies


def link(source: Path, files: Iterable[Stat], pin_dir: Path) -> list[Copy]:
    """Link these files of ``source`` into a new ``pin_dir``; return those that cannot be linked, open.

    Raises OSError, Incomplete, ConfigError.
    """
    copies: list[Copy] = []
    folders.make(pin_dir.parent)
    folders.make_new(pin_dir)
    try:
        with Tree(pin_dir / "files") as tree:
            for file in files:
                with opened_parent(source, file.path) as (parent, name):
                    if not _is_linked(parent, name, tree.place(file.path)):
                        descriptor = open_in(parent, name, source, file.path)
                        _open.add(descriptor)
                        copies.append(Copy(descriptor, file))
    except BaseException:
        close(copies)
        raise
    return copies


def _is_linked(parent: int, name: str, target: tuple[int, str]) -> bool:
    try:
        folders.link(parent, name, *target)
    except OSError as e:
        if e.errno in _NO_LINK:
            return False
        raise
    return True


def copy(copies: Sequence[Copy], pin_dir: Path) -> None:
    """Copy open files, with their times, into a pin.  Raises OSError, or Incomplete if the trainer wrote a file again."""
    with Tree(pin_dir / "files") as tree:
        for one in copies:
            with folders.copy_of(one.descriptor, pin_dir, *tree.place(one.file.path)) as out:
                _send(one, out.fileno())
                now = look(one.descriptor, one.file.path)
                if (now.size, now.mtime) != (one.file.size, one.file.mtime):
                    raise Incomplete(f"{one.file.path}: written again while it was copied")
                os.utime(out.fileno(), ns=(one.file.mtime, one.file.mtime))


def _send(one: Copy, out: int) -> None:
    with contextlib.suppress(OSError):  # most file systems have no reflinks
        fcntl.ioctl(out, _FICLONE, one.descriptor)
        return
    done = 0
    while sent := os.sendfile(out, one.descriptor, done, min(_CHUNK, max(0, one.file.size - done))):
        done += sent


def close(copies: Iterable[Copy]) -> None:
    """Close these files, copied or not."""
    for one in copies:
        _open.discard(one.descriptor)
        os.close(one.descriptor)


def _close_in_child() -> None:
    """Close them in a forked process: a data loader may live as long as the training, and deleted files would fill the disk."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _copy_and_publish(output_dir: Path, fresh: Path, copies: Sequence[Copy], commit: Commit, say: Say) -> None:
    """Copy, then publish the pin, in a thread of its own."""
    lower_priority()
    checkpoint, size = commit.checkpoint, sum(size for size, _ in commit.files.values())
    try:
        remove(make_room(output_dir, fresh, size, say))
        if pins.free_bytes(output_dir) < size:
            say(f"{checkpoint}: not kept, the spool has no room for a copy of {size} bytes")
            return
        copy(copies, fresh)
        pins.publish(output_dir, checkpoint, fresh)
    except Exception as e:  # noqa: BLE001  # nobody waits for this thread: it logs, and the worker judges the files
        say(f"{checkpoint}: not copied into the spool: {type(e).__name__}: {e}")
    finally:
        close(copies)
        discard(fresh)


def lower_priority() -> None:
    """Let the calling thread give way to those that train."""
    with contextlib.suppress(OSError):  # a container may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux a thread has a priority of its own


# --- room on the disk


def _make_room_later(output_dir: Path, newest: Path, size: int, say: Say) -> None:
    """Hide pins now and delete them in a thread: freeing many GB takes a file system seconds."""
    given_up = make_room(output_dir, newest, size, say)
    if given_up:
        _in_thread(lambda: remove(given_up), "ckptsync-remove")


def make_room(output_dir: Path, newest: Path, size: int, say: Say) -> list[Path]:
    """Hide as many pins as a next save of ``size`` bytes needs; log each, and return where they lie, to `remove`.  Raises OSError."""
    lacking = int(FLOOR * size) - pins.free_bytes(output_dir)
    if lacking <= 0:
        return []
    hidden = []
    for one in choose_to_give_up(pins.pins(output_dir), newest, lacking):
        path = one.path.with_name(f".gone-hook-{os.getpid()}-{one.path.name}")
        if folders.renamed(one.path, path):  # else somebody was quicker
            hidden.append(path)
            stored = "it is in the store" if one.stored else "it was NOT yet in the store"
            say(f"{one.checkpoint}: no longer kept in the spool, since the disk is nearly full; {stored}")
    return hidden


def choose_to_give_up(found: Sequence[Pin], newest: Path, wanted: int) -> list[Pin]:
    """Return the pins whose removal frees ``wanted`` bytes: stored ones first, then the oldest; never ``newest``.

    A file that still has the trainer's own name takes no room of its own.
    """
    chosen: list[Pin] = []
    for one in sorted(found, key=lambda p: (not p.stored, p.commit.at if p.commit else p.pulse / 1e9, p.k)):
        gain = sum(f.size for f in one.files if f.links == 1)
        if wanted > 0 and gain and one.path.name != newest.name:
            chosen.append(one)
            wanted -= gain
    return chosen


def remove(hidden: Iterable[Path]) -> None:
    """Delete hidden pins."""
    for path in hidden:
        discard(path)


def discard(folder: Path) -> None:
    """Remove a directory of the spool as far as that is possible: the worker removes the rest."""
    with contextlib.suppress(OSError):
        folders.remove(folder)
