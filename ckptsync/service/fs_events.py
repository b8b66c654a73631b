"""Hints that something was written below a directory, from watchdog's file system events.

A hint only makes a scan come sooner; scans also come without hints.  So nothing here raises, and
losing every event costs time only.  Our own scans open and read files, so these events are no
hints; neither is each piece of a file that is being written.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from watchdog import events
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserverVFS

from ckptsync.mounts import find_mount, is_blind, read_table
from ckptsync.service.directory_changes import directory_states

Mode = Literal["events", "polling", "waiting", "scanned", "none"]
MOST = 20  # directories watched at a time: each has three threads, and `systemd/` allows 256 tasks
POLL_S = 10  # more often than a scan; each time costs one stat of every file on a file server
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM)  # of inotify
_WRITTEN: list[type[events.FileSystemEvent]] = [
    *(events.DirCreatedEvent, events.DirMovedEvent),
    *(events.FileClosedEvent, events.FileCreatedEvent, events.FileMovedEvent),
]
_POLLED = [*_WRITTEN, events.FileModifiedEvent]  # polling sees no file closed
_log = logging.getLogger(__name__)


class _Handler(events.FileSystemEventHandler):
    """Calls ``hint`` at each event."""

    def __init__(self, hint: Callable[[], object]) -> None:
        self._hint = hint

    def on_any_event(self, event: events.FileSystemEvent) -> None:  # noqa: ARG002
        """Wake the loop; runs in watchdog's thread."""
        self._hint()


class Watch:
    """Calls ``hint`` with each path of ``paths`` below which files were written, from any thread.

    Of more than `MOST` paths, only those are watched that changed last.  ``poll_s``: seconds
    between two polls, where there are no events.
    """

    def __init__(
        self, paths: Iterable[str], hint: Callable[[str], object], poll_s: int = POLL_S
    ) -> None:
        """Begin to watch."""
        self._hint, self._poll_s = hint, poll_s
        self._modes: dict[str, Mode] = dict.fromkeys(paths, "none")
        # each with its directory's inode: one that is deleted and made again is another
        self._observers: dict[str, tuple[int, BaseObserver]] = {}
        self._limited: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Begin to watch directories that are new, were replaced, or whose watch has died.

        Ends the watches of missing ones, and of those beyond the `MOST` that changed last.  Waits
        for their threads.  Call it before a scan.
        """
        states = {path: directory_states([path])[0] for path in self._modes}
        newest_dirs = heapq.nlargest(MOST, filter(states.get, states), key=states.__getitem__)
        for path, state in states.items():
            inode, observer = self._observers.get(path, (0, None))
            # watchdog's threads end where a directory vanishes
            threads = (observer, *observer.emitters) if observer else ()
            if path not in newest_dirs:
                self._stop(path, "scanned" if state else "waiting")
            elif inode != state[-1] or not all(thread.is_alive() for thread in threads):
                self._stop(path, "none")
                self._start(path, state[-1])

    def _start(self, path: str, inode: int) -> None:
        """Watch a path by events, or by polling where there are none or inotify has no room.

        Keeps the observer with ``inode``, the number of the directory that it watches.  If neither
        works, logs a warning and keeps none: scans alone find changes.
        """
        real = os.path.realpath(path)  # watchdog watches a link itself, not what it points to
        is_polled = path in self._limited or is_blind(find_mount(read_table(), real).kind)
        # lstat: links lead out of the directory
        poll = partial(PollingObserverVFS, os.lstat, os.scandir, polling_interval=self._poll_s)
        handler, kinds = _Handler(partial(self._hint, path)), _POLLED if is_polled else _WRITTEN
        observer: BaseObserver | None = None
        try:
            observer = poll() if is_polled else Observer()
            observer.schedule(handler, real, recursive=True, event_filter=kinds)
            observer.start()
        except (OSError, RuntimeError) as e:  # gone, not ours to read, or no thread to be had
            if observer:
                observer.stop()  # what it has begun
            if isinstance(e, OSError) and e.errno in _LIMITS and not is_polled:
                self._limited.add(path)
                self._start(path, inode)
            else:
                _log.warning("not watched path=%s error=%s", path, e)
        else:
            self._observers[path] = inode, observer
            self._modes[path] = "polling" if is_polled else "events"

    def modes(self) -> dict[str, Mode]:
        """Return how each path is watched; ``scanned``: not, since other paths changed later."""
        return dict(self._modes)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each path that is polled since inotify's limit was reached."""
        limited = "inotify limit reached (fs.inotify, ulimit -n): polling instead"
        return tuple(f"{path}: {limited}" for path in self._modes if path in self._limited)

    def close(self) -> None:
        """Stop watching: no hint comes after this has returned.  May be called twice."""
        for path in self._modes:
            self._stop(path, "none")

    def _stop(self, path: str, mode: Mode) -> None:
        """Set a path's mode; end its observer if it has one, and wait for its thread."""
        self._modes[path] = mode
        if path in self._observers:
            _, observer = self._observers.pop(path)
            observer.stop()
            observer.join()
