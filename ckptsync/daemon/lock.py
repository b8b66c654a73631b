"""One worker for an output directory and a node id, on one machine: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ckptsync.errors import ConfigError, StoreError
from ckptsync.spool import folders
from ckptsync.walk import UnsafeSpool
from ckptsync.worker.lookout import ALONE


class Locks:
    """Locks held until `close`.  The file's name has the node id in it: nodes that share an output directory do not exclude each other."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._held: dict[str, int] = {}

    def hold(self, spool: Path) -> None:
        """Hold the lock of a spool directory (made if absent); raises ConfigError if another process has it, StoreError if it cannot be made."""
        key = os.path.realpath(spool)
        if key in self._held:
            if _is_of(self._held[key], spool / f"worker-{self._node}.lock"):
                return
            if any(_has_changed(path) for path in (spool.parent, spool)):
                return  # somebody may be removing the output directory at this moment: a new spool would be in the way
            os.close(self._held.pop(key))  # the output directory was removed, and is made again
        try:
            folders.make(spool)
            descriptor = folders.lock_file(spool / f"worker-{self._node}.lock")
        except UnsafeSpool:
            raise
        except OSError as e:
            raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{spool}: another worker of node {self._node} is at work here",
                hint="stop one of them, or give each its own `node` in the configuration",
            ) from None
        self._held[key] = descriptor

    def close(self) -> None:
        """Let go of them all; the files stay, since removing one would let two processes lock two files of one name."""
        while self._held:
            os.close(self._held.popitem()[1])


def _is_of(descriptor: int, path: Path) -> bool:
    """Whether it is the file that lies there now."""
    try:
        found = folders.status(path)
        return found is not None and os.path.samestat(os.fstat(descriptor), found)
    except OSError:
        return False  # gone, or not to be seen: to lock it again says why


def _has_changed(directory: Path) -> bool:
    """Whether a name was put into it, or taken out, within the last seconds."""
    try:
        return abs(time.time() - directory.stat().st_mtime) < ALONE
    except OSError:
        return False  # gone, or not to be seen
