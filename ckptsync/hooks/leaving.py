"""The end of a training process: the final model in the run's root, and, if that is wanted, a wait until the store has everything.

``on_train_end`` comes before the script's own ``save_model``, and nothing is fired after it.  What lies in the root when the
interpreter ends, after a training that ended, is the final model.
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

RESTART = 15.0  # seconds: longer than a service needs to begin again
_POLL = 0.5  # seconds
Weights = frozenset[tuple[str, int, int]]


def weights(root: Path) -> Weights:
    """Which weights lie in a run's root: name, inode and mtime of each."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            if WEIGHTS.fullmatch(entry.name):
                info = entry.stat(follow_symlinks=False)
                found.add((entry.name, info.st_ino, info.st_mtime_ns))
    return frozenset(found)


def final_model(root: Path) -> Listing:
    """The files in a run's root that belong to its final model."""
    with os.scandir(root) as entries:
        names = [e.name for e in entries if OF_MODEL.fullmatch(e.name)]
    return walk(root, names)


def at_end(call: Callable[[], None]) -> Callable[[], object]:
    """Have it called when the script is over; what is returned takes that back.

    A process of multiprocessing that was forked (accelerate's ``notebook_launcher``) calls nothing that `atexit` was told, but what is told here.
    """
    running = sys.modules.get("multiprocessing.process")
    if running is not None and running.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415  # nobody else needs it

        return Finalize(None, call, exitpriority=0).cancel
    atexit.register(call)
    return lambda: atexit.unregister(call)


def has_failed() -> bool:
    """Whether this process ends with an exception that nobody caught: then nothing says that what was begun is whole."""
    now = sys.exc_info()[1]  # multiprocessing's is still on its way, and torch's processes end with 1 when they have caught theirs
    is_exit = now is None or (isinstance(now, SystemExit) and not now.code)
    return getattr(sys, "last_value", None) is not None or not is_exit


@cache
def over() -> float:
    """When the first of those who are told that the script is over asked (`time.monotonic`): all of them wait as long as one."""
    return time.monotonic()


def is_served(spool: Path) -> bool:
    """Whether a worker is at work here: it holds its lock for as long as it lives."""
    try:
        found = folders.children(spool)
    except CkptsyncError:  # not ours, or not to be read: no worker of this user's is at work in it
        return False
    return any(_is_held(path) for path in found if path.name.startswith("worker-") and path.name.endswith(".lock"))


def unstored(output_dir: Path, trains: Collection[str]) -> tuple[str, ...]:
    """The saves of these trainings that are kept here, and that no manifest in the store names yet."""
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
    """Until the store has all of them, or for so long ``since`` (`time.monotonic`; default: now); what it has not got is returned.

    Without a worker for ``restart`` seconds nothing is waited for.
    """
    now = time.monotonic() if since is None else since
    until, gone_at = now + seconds, now + restart
    while left := unstored(output_dir, trains):
        now = time.monotonic()
        if served(output_dir / OURS):
            gone_at = now + restart
        if now >= gone_at:
            say(f"not waiting: no worker is at work in {output_dir / OURS}")
            return left
        if now >= until:
            say(f"waited {seconds:.0f} s: the store has not got {', '.join(left)} yet")
            return left
        time.sleep(_POLL)
    return ()


def _is_held(lock: Path) -> bool:
    """Asked with a shared lock for a moment; who asks exclusively in this very moment is a worker that begins, and its service tries again."""
    try:
        descriptor = folders.lock_file(lock, is_new=False)
    except OSError:
        return False  # it is nobody's, or not for us to know
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
