"""Hints that something was written below a directory, from watchdog.

A hint says "look now" and nothing else: what is true, a scan finds out, a little later also without
any hint.  So nothing here raises, and losing every event costs time only.  Opening and reading,
which our own scans do, is no hint, and neither is each piece of a file that is being written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from watchdog import events
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserverVFS

from ckptsync.mounts import chosen, is_blind, read_table

Mode = Literal["events", "polling", "waiting", "scanned", "none"]
MOST = 20  # directories watched at a time: each has three threads, and `systemd/` allows 256 tasks
POLL_S = 10  # more often than a scan; each time costs one stat of every file on a file server
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM)  # of inotify
_LIMIT = "inotify limit reached (fs.inotify, ulimit -n): polling instead"
_WRITTEN: list[type[FileSystemEvent]] = [
    *(events.DirCreatedEvent, events.DirMovedEvent),
    *(events.FileClosedEvent, events.FileCreatedEvent, events.FileMovedEvent),
]
_POLLED = [*_WRITTEN, events.FileModifiedEvent]  # polling sees no file closed
_IN_CREATE = 0x100
_libc = ctypes.CDLL(None, use_errno=True)  # watchdog's own way to inotify
_log, _WATCHDOGS = logging.getLogger(__name__), logging.getLogger("watchdog")


class Watch:
    """Calls ``hint`` from other threads with a path of ``paths`` below which something was written.

    "" means any of them.  Of more than `MOST` paths those are watched that changed last; the caller
    scans the others, and finds them here with the next refresh.
    """

    def __init__(
        self, paths: Iterable[str], hint: Callable[[str], object], poll_s: int = POLL_S
    ) -> None:
        self._hint, self._poll_s = hint, poll_s
        self._modes: dict[str, Mode] = dict.fromkeys(paths, "none")
        # each with its directory's inode: one that is deleted and made again is another
        self._observers: dict[str, tuple[tuple[int, int], BaseObserver]] = {}
        self._limited: set[str] = set()
        self._losses = _Losses(partial(hint, ""))
        _WATCHDOGS.addHandler(self._losses)
        self.refresh()

    def refresh(self) -> None:
        """Watch what has come into being, and again what was replaced; call it before a scan."""
        mounts = read_table()
        status = {path: info for path in self._modes if (info := _status(path)) is not None}
        lively = heapq.nlargest(MOST, status, key=lambda path: status[path].st_mtime_ns)
        for path, mode in list(self._modes.items()):
            if path not in lively:
                self._stop(path)
                self._modes[path] = "scanned" if path in status else "waiting"
                continue
            inode = (status[path].st_dev, status[path].st_ino)
            inode_before, observer = self._observers.get(path, (None, None))
            if mode == "events" and _is_at_limit(path):
                self._limited.add(path)
            elif observer and inode_before == inode and _is_alive(observer):
                continue
            self._stop(path)
            self._modes[path] = self._start(path, inode, mounts)

    def _start(self, path: str, inode: tuple[int, int], mounts: Sequence[str]) -> Mode:
        """Watch by events, or by polling where these are blind or a limit of inotify is reached."""
        real = os.path.realpath(path)  # watchdog watches a link itself, not what it points to
        is_polled = path in self._limited or is_blind(chosen(mounts, real).kind)
        observer: BaseObserver | None = None
        try:
            # lstat: links lead out of the directory
            polling = PollingObserverVFS(os.lstat, os.scandir, polling_interval=self._poll_s)
            observer = polling if is_polled else Observer()
            handler = _Handler(partial(self._hint, path))
            kinds = _POLLED if is_polled else _WRITTEN
            observer.schedule(handler, real, recursive=True, event_filter=kinds)
            observer.start()
        except (OSError, RuntimeError) as e:  # gone, not ours to read, or no thread to be had
            if observer:
                observer.stop()  # what it has begun
            if isinstance(e, OSError) and e.errno in _LIMITS and not is_polled:
                self._limited.add(path)
                return self._start(path, inode, mounts)
            _log.warning("not watched path=%s error=%s", path, e)
            return "none"
        self._observers[path] = inode, observer
        return "polling" if is_polled else "events"

    def modes(self) -> dict[str, Mode]:
        """Return how each path is watched: by events, by polling, only by scans, or not at all.

        ``waiting``: it does not exist yet.  ``scanned``: other paths changed later.
        """
        return dict(self._modes)

    def notes(self) -> tuple[str, ...]:
        """Return where events cannot be had, and that some were lost, in words."""
        limited = [f"{path}: {_LIMIT}" for path in self._modes if path in self._limited]
        lost = f"file system events were lost {self._losses.count} times; scans find what changed"
        return (*limited, *([f"{lost}: {self._losses.last}"] if self._losses.count else ()))

    def close(self) -> None:
        """Stop watching: no hint comes after this has returned.  May be called twice."""
        _WATCHDOGS.removeHandler(self._losses)
        for path in self._modes:
            self._stop(path)
            self._modes[path] = "none"

    def _stop(self, path: str) -> None:
        _, observer = self._observers.pop(path, (None, None))
        if observer:
            observer.stop()
            observer.join()


class _Handler(FileSystemEventHandler):
    def __init__(self, hint: Callable[[], object]) -> None:
        self._hint = hint

    def on_any_event(self, event: FileSystemEvent) -> None:  # noqa: ARG002
        """Wake the loop; runs in watchdog's thread."""
        self._hint()


class _Losses(logging.Handler):
    """Counts the events that watchdog logs as lost, and asks for a scan."""

    def __init__(self, hint: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self._hint, self.count, self.last = hint, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Runs in watchdog's thread."""
        self.count, self.last = self.count + 1, record.getMessage()[:200]
        self._hint()


def _status(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path)  # noqa: PTH116 - no path of a file
    return None  # not there yet, or not ours to read: a scan says so


def _is_at_limit(directory: str) -> bool:
    """Return whether no watch is left: watchdog is silent about directories that came later."""
    fd = _libc.inotify_init1(os.O_CLOEXEC) if hasattr(_libc, "inotify_init1") else -1
    if fd < 0:  # no Linux; or no instance left, which the one that we have does not need
        return False
    is_refused = _libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE) < 0
    error = ctypes.get_errno()
    os.close(fd)
    return is_refused and error == errno.ENOSPC


def _is_alive(observer: BaseObserver) -> bool:
    """Return whether watchdog still listens: its threads end where a directory vanishes."""
    return observer.is_alive() and all(emitter.is_alive() for emitter in observer.emitters)
