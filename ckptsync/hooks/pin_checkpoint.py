"""Pins a checkpoint from the training process: gives all its files a second name.

The training must not wait, and rotation comes soon.  A hard link costs some µs whatever the file's
size, and rotation then removes only the trainer's own name; one rename publishes all links together
with the statement that the save is whole.  Where the spool cannot have links to the checkpoint
(another file system), the files are opened, which keeps their bytes, and a thread of low priority
copies them beside the training.

Perhaps nobody empties the spool, so each pin leaves room for the next save: the hook drops pins,
stored ones and oldest ones first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool import markers, pins, safe_files
from ckptsync.spool.markers import Commit
from ckptsync.spool.pins import Pin
from ckptsync.spool.safe_files import Tree
from ckptsync.walk import SPOOL, Listing, Stat, open_checkpoint_file, stat_open, walk

# the Trainer's just-in-time save removes this file when it is done
SENTINEL = "checkpoint-is-incomplete.txt"
_ADAPTER_CONFIG = "adapter_config.json"
COPY_THREAD = "ckptsync-copy"
# saves that must fit on the disk after each pin: the trainer writes the next one before it deletes
# one
FLOOR = 1.5
Log = Callable[[str], None]
Copies = list[tuple[int, Stat]]
"""Open files that are still to be copied into a pin."""


def pin_checkpoint(
    path: Path,
    output_dir: Path,
    commit: Commit,
    log: Log,
    *,
    list_files: Callable[[Path], Listing] = walk,
    added: Path | None = None,
) -> None:
    """Pin the files of the checkpoint at ``path``, and drop pins that the next save's room needs.

    Does nothing without files.  A pin that needs copies appears when a thread has made them.

    Args:
        path: the checkpoint.
        output_dir: where the spool is.
        commit: the marker to write, without its files.
        log: gets messages.
        list_files: lists the checkpoint.
        added: a directory of files that the checkpoint may lack.

    Raises:
        Incomplete, OSError, CkptsyncError: the trainer writes or deletes at this moment, or the
            disk refuses.  Then there is no pin, and the worker judges the files; but if `make_room`
            raised, the pin is there.

    """
    listing = list_files(path)
    if any(s.path.rpartition("/")[2] == SENTINEL for s in listing.partial):
        raise Incomplete(f"{commit.checkpoint}: it is still being written")
    if not listing.files:
        return  # this node has none of it
    # two of one name may be under way: the one before may still be copied
    draft_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    draft = output_dir / SPOOL / "pins" / f".new-hook-{draft_id}-{commit.checkpoint}"
    full_commit = replace(commit, files={s.path: (s.size, s.mtime) for s in listing.files})
    copies: Copies = []
    try:
        safe_files.make_folders(draft.parent)
        safe_files.make_new_folder(draft)
        with Tree(draft / "files") as tree:
            for file in listing.files:
                if not pins.link_file(tree, path, file.path):
                    copies.append((open_checkpoint_file(path, file.path), file))
        _require_same(listing, list_files(path), commit.checkpoint)
        if added is not None:
            _link_added(added, full_commit.files, draft)
        markers.write_mark(draft / "commit.json", full_commit)
        if copies:
            _in_thread(
                lambda: _copy_and_publish(output_dir, draft, copies, full_commit, log), COPY_THREAD
            )
            return
        newest = pins.publish(output_dir, commit.checkpoint, draft)
    except BaseException:
        _close(copies)
        discard(draft)  # its links would hold the bytes of a save that has no pin
        raise
    hidden = make_room(output_dir, newest, sum(s.size for s in listing.files), log)
    if hidden:  # freeing many GB takes a file system seconds
        _in_thread(lambda: [*map(discard, hidden)], "ckptsync-remove")


def _require_same(before: Listing, now: Listing, checkpoint: str) -> None:
    """Raise Incomplete if files have changed between two listings."""
    if now.files != before.files:  # by rotation, one file after the other, or by a writer
        raise Incomplete(f"{checkpoint}: its files changed while they were pinned")


def _link_added(added: Path, paths: Collection[str], draft: Path) -> None:
    """Link the added files that the checkpoint lacks into a pin's draft.

    A checkpoint with an adapter's configuration gets no other.
    """
    has_adapter = any(path.rpartition("/")[2] == _ADAPTER_CONFIG for path in paths)
    files = [f for f in walk(added).files if f.path not in paths]
    if has_adapter:
        files = [f for f in files if f.path.rpartition("/")[2] != _ADAPTER_CONFIG]
    if not files:
        return
    with Tree(draft / "added") as tree:
        for file in files:
            tree.place(file.path)  # makes its directory
            with contextlib.suppress(FileNotFoundError):  # somebody deleted it
                safe_files.link_or_copy(added / file.path, draft / "added" / file.path)


def _in_thread(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a thread that the interpreter's end waits for.

    Run it in this thread if the interpreter is ending, or the system gives no more threads.
    """
    if threading.main_thread().is_alive():
        try:
            threading.Thread(target=work, name=name).start()
        except RuntimeError:  # the system gives no more
            work()
    else:
        work()


def discard(folder: Path) -> None:
    """Remove a directory of the spool as far as possible; the worker removes what is left."""
    with contextlib.suppress(OSError):
        safe_files.remove(folder)


# --- copies, where the file system has no links


def _copy_and_publish(
    output_dir: Path, draft: Path, copies: Copies, commit: Commit, log: Log
) -> None:
    """Copy open files into a pin's draft and publish it; log any error.  Runs in its own thread.

    Drops pins first if the disk is nearly full.  Closes the files and removes a draft that failed.
    """
    checkpoint, size = commit.checkpoint, sum(size for size, _ in commit.files.values())
    try:
        with contextlib.suppress(OSError):  # a container may forbid it
            # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        for path in make_room(output_dir, draft, size, log):
            discard(path)
        if pins.free_bytes(output_dir) < size:
            log(
                f"{checkpoint}: not pinned: no room in the spool for a copy of {size} bytes;"
                " rotation may delete it before it is uploaded"
            )
            return
        _copy(copies, draft)
        pins.publish(output_dir, checkpoint, draft)
    except Exception as e:  # noqa: BLE001  # nobody waits for this thread: it logs, and the worker judges the files
        log(f"{checkpoint}: not copied into the spool: {type(e).__name__}: {e}")
    finally:
        _close(copies)
        discard(draft)


def _copy(copies: Copies, draft: Path) -> None:
    """Copy open files, with their times; raise Incomplete if the trainer wrote one again."""
    with Tree(draft / "files") as tree:
        for descriptor, file in copies:
            with safe_files.create_copy(descriptor, draft, *tree.place(file.path)) as out:
                safe_files.copy_bytes(descriptor, out.fileno(), file.size)
                now = stat_open(descriptor, file.path)
                if (now.size, now.mtime) != (file.size, file.mtime):
                    raise Incomplete(f"{file.path}: written again while it was copied")
                os.utime(out.fileno(), ns=(file.mtime, file.mtime))


def _close(copies: Copies) -> None:
    """Close the files that are still open."""
    while copies:
        os.close(copies.pop()[0])


# --- room on the disk


def make_room(output_dir: Path, newest: Path, size: int, log: Log) -> list[Path]:
    """Hide as many pins as a next save of ``size`` bytes needs, never ``newest``; log each.

    Return their new paths, for the caller to remove; [] if there is room.  Raises OSError or one
    of ckptsync's errors.
    """
    lacking = int(FLOOR * size) - pins.free_bytes(output_dir)
    if lacking <= 0:
        return []
    hidden = []
    for pin in choose_pins_to_drop(pins.list_pins(output_dir), newest, lacking):
        path = pin.path.with_name(f".gone-hook-{os.getpid()}-{pin.path.name}")
        if safe_files.try_rename(pin.path, path):  # else somebody was quicker
            hidden.append(path)
            stored = "it is in the store" if pin.stored else "it was NOT yet in the store"
            log(
                f"{pin.checkpoint}: no longer kept in the spool, since the disk is nearly full;"
                f" {stored}"
            )
    return hidden


def choose_pins_to_drop(pins_here: Sequence[Pin], newest: Path, lacking: int) -> list[Pin]:
    """Return the pins whose removal frees ``lacking`` bytes: stored ones first, then the oldest.

    All that free something if they are not enough; never ``newest``.  A file that still has the
    trainer's own name frees nothing.
    """
    chosen: list[Pin] = []
    for pin in sorted(
        pins_here, key=lambda p: (not p.stored, p.commit.at if p.commit else p.renewed / 1e9, p.k)
    ):
        gain = sum(f.size for f in pin.files if f.links == 1)
        if lacking > 0 and gain and pin.path.name != newest.name:
            chosen.append(pin)
            lacking -= gain
    return chosen
