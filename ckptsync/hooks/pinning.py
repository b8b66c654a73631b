"""The hook's pin: every file of a save under a second name, with the word that it is whole, seen by the worker all at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.hooks import linking, room
from ckptsync.hooks.here import Here
from ckptsync.spool import folders, marks, pins
from ckptsync.spool.marks import Commit
from ckptsync.walk import Listing, Stat, walk

SENTINEL = "checkpoint-is-incomplete.txt"  # Trainer's just-in-time save takes it away when it is done
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be pinned: ``look`` says what lies there now; ``added`` may hold files that it has not got."""

    checkpoint: str
    path: Path
    look: Callable[[Path], Listing]
    added: Path | None = None


@dataclass(frozen=True, slots=True)
class _Staged:
    fresh: Path
    size: int
    copies: Sequence[linking.Copy]


def pin(here: Here, source: Source, commit: Commit, say: Say) -> None:
    """Pin it; its files go into ``commit``.  Where only copies are possible, a thread makes them, and publishes the pin then.

    Raises Incomplete (the trainer writes or deletes at this moment), OSError or StoreError: then there is no pin, and the worker
    judges the files.
    """
    listing = source.look(source.path)
    if any(s.path.rpartition("/")[2] == SENTINEL for s in listing.partial):
        raise Incomplete(f"{source.checkpoint}: it is still being written")
    if not listing.files:
        return  # this node has none of it
    # of one name there may be two at a time: the one before may still be copied
    fresh = here.spool / "pins" / f".new-hook-{os.getpid()}-{secrets.token_hex(4)}-{source.checkpoint}"
    staged = _staged(source, listing.files, fresh, commit)
    if not staged.copies:
        publish(here, source.checkpoint, fresh, staged.size, say)
        return
    try:
        _aside(lambda: _copied(here, source, staged, say), "ckptsync-copy")
    except RuntimeError:  # this user may have no more threads
        _let_go(staged)
        raise


def publish(here: Here, checkpoint: str, fresh: Path, size: int, say: Say) -> None:
    """Let what was made whole in ``fresh``, of ``size`` bytes, be the newest pin; raises as `pin` does."""
    try:
        newest = pins.publish(here.output_dir, checkpoint, fresh)
    except BaseException:
        room.forget(fresh)  # its links would hold the bytes of what is no pin
        raise
    given = room.make_room(here.output_dir, newest, size)
    if given:
        _tell(given, say)
        _aside(lambda: room.remove(given), "ckptsync-remove")


def _aside(work: Callable[[], None], name: str) -> None:
    """In a thread that the interpreter's end waits for; when that has begun it waits for no new one, and from Python 3.12 on allows none: then here and now.

    Raises RuntimeError where no thread can be made.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name=name).start()
    else:
        work()


def _staged(source: Source, files: Sequence[Stat], fresh: Path, commit: Commit) -> _Staged:
    copies: Sequence[linking.Copy] = ()
    try:
        copies = linking.link(source.path, files, fresh)
        _check_still(source, files)
        _link_added(source.added, {s.path for s in files}, fresh)
        marks.write_mark(fresh / "commit.json", _with_files(commit, files))
    except BaseException:
        linking.close(copies)
        room.forget(fresh)
        raise
    return _Staged(fresh, sum(s.size for s in files), copies)


def _check_still(source: Source, files: Sequence[Stat]) -> None:
    """Rotation takes one file after the other: had it begun, not all would still be here."""
    if source.look(source.path).files != tuple(files):
        raise Incomplete(f"{source.checkpoint}: its files changed while they were pinned")


def _with_files(commit: Commit, files: Sequence[Stat]) -> Commit:
    found = {s.path: (s.size, s.mtime) for s in files}
    return Commit(
        *(commit.train, commit.save, commit.checkpoint, commit.step, commit.world, commit.ranks, commit.host, commit.trainer),
        *(commit.at, found),
    )


def _link_added(folder: Path | None, there: set[str], fresh: Path) -> None:
    if folder is None:
        return
    for file in walk(folder).files:
        if file.path not in there and "/" not in file.path:
            folders.make_in(fresh / "added")
            with contextlib.suppress(FileNotFoundError):  # somebody deleted it
                folders.link_or_copy(folder / file.path, fresh / "added" / file.path)


def _copied(here: Here, source: Source, staged: _Staged, say: Say) -> None:
    """In a thread of its own: copy, then publish."""
    linking.gently()
    try:
        given = room.make_room(here.output_dir, staged.fresh, staged.size)
        _tell(given, say)
        room.remove(given)
        if room.free(here.spool) < staged.size:
            say(f"{source.checkpoint}: not kept, the spool has no room for a copy of {staged.size} bytes")
            return
        linking.copy(staged.copies)
        pins.publish(here.output_dir, source.checkpoint, staged.fresh)
    except Exception as e:  # noqa: BLE001  # nobody waits for this thread: what it cannot do is said, and the worker judges the files
        say(f"{source.checkpoint}: not copied into the spool: {type(e).__name__}: {e}")
    finally:
        _let_go(staged)


def _let_go(staged: _Staged) -> None:
    linking.close(staged.copies)
    room.forget(staged.fresh)


def _tell(given: Sequence[pins.Pin], say: Say) -> None:
    for lost in given:
        kept = "it is in the store" if lost.stored else "it was NOT yet in the store"
        say(f"{lost.checkpoint}: no longer kept in the spool, since the disk is nearly full; {kept}")
