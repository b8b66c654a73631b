"""One worker for an output directory and a node id, on one machine: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ckptsync.errors import ConfigError, StoreError


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
            os.close(self._held.pop(key))  # the output directory was removed, and is made again
        try:
            spool.mkdir(mode=0o755, exist_ok=True)
            descriptor = os.open(spool / f"worker-{self._node}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
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
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except OSError:
        return False  # gone, or not to be seen: to lock it again says why
