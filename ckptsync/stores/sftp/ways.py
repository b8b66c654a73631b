"""The directories that files are written into, made when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptsync.errors import StoreError
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.wire import Code, Refused

_TRIES = 8  # each lost to another process that deleted the same empty directory in between


class Ways:
    """Remembers which directories are there, with durable names of their own."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._there: set[str] = set()
        self._lock = threading.Lock()

    def within(self, directory: str, step: Callable[[Session], None]) -> None:
        """Take a step in a directory ("" is the root) which is made if it is not there; raises Refused as the step does, StoreError."""
        for _ in range(_TRIES):
            try:
                self.make(directory)
                self._files.sessions.on(step)
            except Refused as e:
                if e.code != Code.NO_SUCH_FILE:
                    raise
                self.forget(directory)
                continue
            return
        raise StoreError(f"{self._files.told(directory)}: deleted by somebody else {_TRIES} times while it was made")

    def make(self, directory: str) -> None:
        """Make it ("" is the root), and those above it, unless they are known to be there; raises Refused, StoreError."""
        wanted = ["", *_parents(directory)]
        with self._lock:
            missing = [path for path in wanted if path not in self._there]
        for path in missing:
            if path:
                self._files.make_directory(
                    path
                )  # also where another writer made it a moment ago and may be killed before it is durable
            else:
                self._files.look()
            with self._lock:
                self._there.add(path)

    def settle(self, directory: str) -> None:
        """What was done to the names in a directory that is there is durable, whoever did it, as is the directory itself.

        It is synced each time, since another writer may have added a name a moment ago.  Those above are not: who makes a directory again syncs
        its name before there is a file in it.
        """
        with self._lock:
            doubtful = [path for path in _parents(directory) if path not in self._there]
        for path in doubtful:
            self._files.sync_directory(path.rpartition("/")[0])
            with self._lock:
                self._there.add(path)
        self._files.sync_directory(directory)

    def forget(self, directory: str) -> None:
        """It, or one above it, may be gone."""
        with self._lock:
            self._there -= {"", *_parents(directory)}


def _parents(directory: str) -> list[str]:
    parts = directory.split("/") if directory else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]
