"""The directories on the way to a file: made where they are missing, and durable before anything in them is."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ckptsync.stores import beneath
from ckptsync.stores.openfiles import OpenFile
from ckptsync.stores.posix.commit import sync_directory

MOST = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class Ways:
    """Directories beneath ``root``, which must exist.  Raises OSError.  Threads may share it.

    Those whose own names are known to be durable are kept open: while one is, no directory that somebody else makes in its place can
    have its number.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._durable: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def made(self, way: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Descriptors of the root and of every directory on the way, made where it was missing.

        Somebody else may delete one as long as it is empty (FileNotFoundError): only with a file in the last one they stay, and may be `secure`d.
        """
        with contextlib.ExitStack() as stack:
            found = [os.open(self._root, _DIRECTORY)]
            stack.callback(beneath.let_go, found[0])
            for part in way:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=found[-1])
                found.append(os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=found[-1]))
                stack.callback(beneath.let_go, found[-1])
            yield tuple(found)

    def secure(self, way: Sequence[str], made: Sequence[int]) -> None:
        """See that the names of all directories on the way are durable, also of those that another writer made and may not live to sync."""
        for n, (above, at) in enumerate(itertools.pairwise(made), start=1):
            path = "/".join(way[:n])
            if not self._is_durable(path, at):
                sync_directory(above)
                self._keep(path, OpenFile(os.dup(at)))

    def after_delete(self, way: Sequence[str]) -> None:
        """Of a file: that it is gone is durable, and directories that this leaves empty go, too: trainers take a directory for a checkpoint."""
        with contextlib.suppress(FileNotFoundError):  # gone, with everything in it
            self.settle(way)
        self.drop_empty(way)

    def drop_empty(self, way: Sequence[str]) -> None:
        """A directory and those above it, as far as nothing is in them."""
        while way:
            try:
                with beneath.parent_of(self._root, "/".join(way)) as (at, last):
                    os.rmdir(last, dir_fd=at)
            except FileNotFoundError:
                pass  # somebody else has, and may have died over the one above
            except OSError:
                return  # not empty, or not ours to delete: an empty directory does no harm
            way = way[:-1]

    def settle(self, way: Sequence[str]) -> None:
        """What was done to the names in a directory is durable, whoever did it."""
        at = beneath.open_directory(self._root, way, _DIRECTORY)
        try:
            sync_directory(at)
        finally:
            beneath.let_go(at)

    def forget_older(self, seconds: float) -> None:
        """Let go of directories opened longer ago: what is kept open cannot be unmounted."""
        now = time.monotonic()
        with self._lock:
            for path in [p for p, kept in self._durable.items() if now - kept.since > seconds]:
                del self._durable[path]

    def _is_durable(self, path: str, at: int) -> bool:
        with self._lock:
            kept = self._durable.get(path)
        return kept is not None and kept.is_same(at)

    def _keep(self, path: str, directory: OpenFile) -> None:
        with self._lock:
            self._durable[path] = directory
            self._durable.move_to_end(path)
            if len(self._durable) > MOST:
                self._durable.popitem(last=False)
