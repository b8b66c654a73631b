"""The end of a training process: what is called then, the final model, and the wait until the store has everything.

``on_train_end`` comes before the script's own ``save_model``, and the Trainer calls nothing after it.  The final model is what
lies in the run's root when the interpreter ends, after a training that ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

from ckptsync.errors import CkptsyncError
from ckptsync.scan import OF_MODEL, WEIGHTS
from ckptsync.spool import folders, pins
from ckptsync.walk import OURS, Listing, walk

RESTART = 15.0  # seconds: longer than a service needs to restart
_POLL = 0.5  # seconds
Weights = frozenset[tuple[str, int, int]]


def at_end(call: Callable[[], None]) -> Callable[[], object]:
    """Call ``call`` when the script is over; return a function that takes that back.

    A process that multiprocessing forked (accelerate's ``notebook_launcher``) does not run `atexit`, but its own finalizers.
    """
    running = sys.modules.get("multiprocessing.process")
    if running is not None and running.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415  # nobody else needs it

        return Finalize(None, call, exitpriority=0).cancel
    atexit.register(call)
    return lambda: atexit.unregister(call)


def has_failed() -> bool:
    """Return whether this process ends with an uncaught exception: then nobody knows whether its last files are whole."""
    now = sys.exc_info()[
        1
    ]  # multiprocessing's is still being raised, and torch's processes exit with 1 when they have caught theirs
    is_exit = now is None or (isinstance(now, SystemExit) and not now.code)
    return getattr(sys, "last_value", None) is not None or not is_exit


@cache
def end_began() -> float:
    """Return when the end of the script began (`time.monotonic`, at the first call): several waits last as long as one."""
    return time.monotonic()


def weights(root: Path) -> Weights:
    """Return name, inode and mtime of each weights file in a run's root."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            if WEIGHTS.fullmatch(entry.name):
                info = entry.stat(follow_symlinks=False)
                found.add((entry.name, info.st_ino, info.st_mtime_ns))
    return frozenset(found)


def final_model(root: Path) -> Listing:
    """Return the files in a run's root that belong to its final model."""
    with os.scandir(root) as entries:
        names = [e.name for e in entries if OF_MODEL.fullmatch(e.name)]
    return walk(root, names)


def is_served(spool: Path) -> bool:
    """Return whether a worker is at work here: it holds its lock for as long as it lives."""
    try:
        found = folders.children(spool)
    except CkptsyncError:  # another user's: no worker of this user is at work in it
        return False
    return any(_is_held(path) for path in found if path.name.startswith("worker-") and path.name.endswith(".lock"))


def _is_held(lock: Path) -> bool:
    """Try a shared lock for a moment.  A worker that starts in this moment finds it held; its service tries again."""
    try:
        descriptor = folders.lock_file(lock, is_new=False)
    except OSError:
        return False  # gone, or not readable
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def unstored(output_dir: Path, trains: Collection[str]) -> tuple[str, ...]:
    """Return the pins of these trainings' saves that no manifest in the store names yet."""
    ours = (p for p in pins.pins(output_dir) if p.commit is not None and p.commit.train in trains)
    return tuple(p.path.name for p in ours if not p.stored)


def wait(
    output_dir: Path,
    trains: Collection[str],
    seconds: float,
    say: Callable[[str], None],
    *,
    served: Callable[[Path], bool] = is_served,
    restart: float = RESTART,
    since: float | None = None,
) -> tuple[str, ...]:
    """Wait until the store has all saves of these trainings, ``seconds`` at most; return the pins that it has not.

    Give up when no worker is at work for ``restart`` seconds.  ``since``: when the wait began (default: now).
    """
    now = time.monotonic() if since is None else since
    until, restarted_by = now + seconds, now + restart
    while left := unstored(output_dir, trains):
        now = time.monotonic()
        if served(output_dir / OURS):
            restarted_by = now + restart
        if now >= restarted_by:
            say(f"not waiting: no worker is at work in {output_dir / OURS}")
            return left
        if now >= until:
            say(f"waited {seconds:.0f} s: the store has not got {', '.join(left)} yet")
            return left
        time.sleep(_POLL)
    return ()
