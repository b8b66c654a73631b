"""Hints that something changed below a directory, from watchdog and from a quick check each second.

A hint says "look now" and nothing else: what is true, a scan finds out, a little later also without
any hint.  So nothing here raises after construction, and losing every event costs time only.  Only
what a finished write looks like is listened to: opening and reading, which our own scans do, would
hint for ever, and an event for each piece written would cost the trainer CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserverVFS

from ckptsync.checkpoint_dirs import NESTED
from ckptsync.mounts import chosen, is_blind, read_table
from ckptsync.walk import SPOOL, open_directory, split

Mode = Literal["events", "polling", "waiting", "scanned", "none"]
# directories that are watched at a time: watchdog has three threads for each, and `systemd/` allows
# a service 256 tasks
MOST = 20
# often enough to beat a scan a minute; each time costs one stat of every file on a file server
POLL_S = 10

# of inotify: instances, files, watches, memory
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM})
_FINISHED: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileMovedEvent,
]
_POLLED: list[type[FileSystemEvent]] = [*_FINISHED, FileModifiedEvent]
_IN_CREATE = 0x100
_libc = ctypes.CDLL(None, use_errno=True)  # watchdog's own way to inotify
_log = logging.getLogger(__name__)
_WATCHDOGS = logging.getLogger("watchdog")
_CONTAINERS = (*NESTED, "lightning_logs")  # new checkpoints appear in them, however old they are
_NEWEST = 3  # folders at each depth
_DEEPEST = 4  # such as lightning_logs/version_0/checkpoints/last.ckpt
_MOST_CHECKED = 64  # directories of an output directory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


Hint = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Aim:
    """What is watched for a path.

    A directory that is deleted and made again is another one, and needs another watch.
    """

    directory: str
    identity: tuple[int, int]
    is_whole: bool  # the path itself with all below it, not just the entries of a directory above
    is_blind: bool


class Watch:
    """Calls ``hint`` from other threads with a path of ``paths`` below which something changed.

    "" means any of them.  It may be called very often, and does not call this object.

    Paths need not exist yet: the nearest directory above is watched until `refresh` finds them.  Of
    more than `MOST` paths those are watched that changed last; the caller scans the others
    (`ckptsync.service.worker_role`), and finds them here with the next refresh.
    """

    def __init__(self, paths: Iterable[str], hint: Hint, poll_s: int = POLL_S) -> None:
        self._paths, self._hint, self._poll_s = tuple(dict.fromkeys(paths)), hint, poll_s
        self._armed: dict[str, tuple[_Aim, BaseObserver | None, Mode]] = {}
        self._losses = _Losses(partial(hint, ""))
        _WATCHDOGS.addHandler(self._losses)
        self.refresh()

    def refresh(self) -> None:
        """Watch what has come into being, and again what was replaced.

        Cheap where nothing changed; call it before every scan.
        """
        mounts, lively = read_table(), self._paths
        if len(self._paths) > MOST:  # those that changed last: their trainings go on
            lively = tuple(heapq.nlargest(MOST, self._paths, _changed))
        for path in self._paths:
            aim = _aim(path, mounts) if path in lively else None
            armed = self._armed.get(path)
            limit = _limit(armed[0].directory) if armed and armed[2] == "events" else None
            if aim and armed and armed[0] == aim and not limit and _is_alive(armed[1]):
                continue
            self._disarm(path)
            if aim:
                listener = _Listener(partial(self._hint, path))
                self._armed[path] = (aim, *_arm(aim, listener, self._poll_s, limit))

    def modes(self) -> dict[str, Mode]:
        """Return how each path is watched: by events, by polling, only by scans, or not at all.

        ``waiting``: it does not exist yet.  ``scanned``: other paths changed later.
        """
        lacking: Mode = "scanned" if len(self._paths) > MOST else "none"
        armed = {path: mode for path, (_, _, mode) in self._armed.items()}
        return {path: armed.get(path, lacking) for path in self._paths}

    def notes(self) -> tuple[str, ...]:
        """Return where events cannot be had, and that some were lost, in words."""
        why = "inotify limit reached (fs.inotify, ulimit -n): polling instead"
        armed = [(path, self._armed[path]) for path in self._paths if path in self._armed]
        limited = [
            f"{path}: {why}"
            for path, (aim, _, mode) in armed
            if mode == "polling" and not aim.is_blind
        ]
        return (*limited, *self._losses.notes())

    def close(self) -> None:
        """Stop watching: no hint comes after this has returned.  May be called twice."""
        _WATCHDOGS.removeHandler(self._losses)
        for path in self._paths:
            self._disarm(path)

    def _disarm(self, path: str) -> None:
        _, observer, _ = self._armed.pop(path, (None, None, None))
        if observer:
            observer.stop()
            observer.join()


class _Listener(FileSystemEventHandler):
    def __init__(self, hint: Callable[[], object]) -> None:
        self._hint = hint

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Runs in watchdog's thread."""
        if not isinstance(event, tuple(_POLLED)):
            return
        try:
            self._hint()
        except Exception:  # noqa: BLE001
            # An error here would end watchdog's thread, and with it every later hint.  What it
            # hinted at, a scan finds.
            _log.exception("hint failed path=%s", os.fsdecode(event.src_path))


class _Losses(logging.Handler):
    """Counts the file system events that watchdog logs as lost, and asks for a scan."""

    def __init__(self, hint: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self._hint, self._count, self._last = hint, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Runs in watchdog's thread.  A scan finds what was lost."""
        self._count, self._last = self._count + 1, record.getMessage()[:200]
        self._hint()

    def notes(self) -> tuple[str, ...]:
        lost = f"file system events were lost {self._count} times; scans find what changed"
        return (f"{lost}: {self._last}",) if self._count else ()


def _changed(path: str) -> int:
    with contextlib.suppress(OSError):
        return Path(path).stat().st_mtime_ns
    return 0  # not there yet, or not ours to read


def _aim(path: str, mounts: Sequence[str]) -> _Aim | None:
    """Return the directory to watch for ``path``: itself, or the nearest one above that exists."""
    try:
        wanted = Path(path).resolve()  # watchdog watches a link itself, not what it points to
        for found in (wanted, *wanted.parents):
            if found.is_dir():
                info = found.stat()
                blind = is_blind(chosen(mounts, str(found)).kind)
                return _Aim(str(found), (info.st_dev, info.st_ino), found == wanted, blind)
    except (OSError, RuntimeError) as e:
        # no permission, a server that is away, links in a circle: a scan says so, and raises
        _log.warning("not watched path=%s error=%s", path, e)
    return None


def _limit(directory: str) -> OSError | None:
    """Return the error of the limit of watches, if that is reached.

    watchdog does not report it for a directory that came after the first.
    """
    fd = _libc.inotify_init1(os.O_CLOEXEC) if hasattr(_libc, "inotify_init1") else -1
    if fd < 0:  # no Linux; or no instance left, which the one that we have does not need
        return None
    is_refused = _libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE) < 0
    failed = ctypes.get_errno() if is_refused else 0
    os.close(fd)
    return OSError(failed, os.strerror(failed)) if failed == errno.ENOSPC else None


def _arm(
    aim: _Aim, listener: _Listener, poll_s: int, limit: OSError | None
) -> tuple[BaseObserver | None, Mode]:
    """Watch by events, or by polling where events are blind or a limit of inotify is reached."""
    try:
        if not aim.is_blind:
            try:
                if limit:
                    raise limit
                return _started(Observer(), aim, listener, "events")
            except OSError as e:
                if e.errno not in _LIMITS:
                    raise
                what = "inotify limit reached, polling instead path=%s every=%ss error=%s"
                _log.warning(what, aim.directory, poll_s, e)
        # lstat: links lead out of the directory
        polling = PollingObserverVFS(os.lstat, os.scandir, polling_interval=poll_s)
        return _started(polling, aim, listener, "polling")
    except (OSError, RuntimeError) as e:
        _log.warning("not watched path=%s error=%s", aim.directory, e)
        return None, "none"


def _started(
    observer: BaseObserver, aim: _Aim, listener: _Listener, mode: Mode
) -> tuple[BaseObserver, Mode]:
    """Start an observer.

    Raises OSError, and RuntimeError where this user or service may have no more threads.
    """
    events = _FINISHED if mode == "events" else _POLLED
    observer.schedule(listener, aim.directory, recursive=aim.is_whole, event_filter=events)
    try:
        observer.start()
    except RuntimeError:
        observer.stop()  # what it has begun
        raise
    return observer, mode if aim.is_whole else "waiting"


def _is_alive(observer: BaseObserver | None) -> bool:
    """Return whether watchdog still listens.

    Its threads end where a directory vanishes, and on errors of its own.
    """
    return (
        observer is not None
        and observer.is_alive()
        and all(emitter.is_alive() for emitter in observer.emitters)
    )


# A quick check each second, for where no event can be relied on.


def directory_states(directories: Iterable[str | Path]) -> tuple[tuple[int, ...], ...]:
    """Return a tuple that differs once a name in one of these directories has come or gone.

    A directory's times change with the names in it, and with nothing else: only a scan finds what
    a file gains.  So a check makes scans sooner and never replaces them.

    Some µs each.  They are opened, not only looked up, since NFS asks the server again at an open.
    A directory that is missing is no error.
    """
    states: list[tuple[int, ...]] = []
    for directory in directories:
        path = Path(directory)
        try:
            fd = open_directory(path) if split(path)[1] else os.open(path, _DIRECTORY)
        except OSError:  # not there yet, or not ours to read: a scan says so
            states.append(())
            continue
        try:
            info = os.fstat(fd)
            # two changes within a tick of the kernel's clock have one time, but seldom one size
            states.append((info.st_mtime_ns, info.st_nlink, info.st_size, info.st_ino))
        except OSError:  # a file server that forgot it
            states.append(())
        finally:
            os.close(fd)
    return tuple(states)


def directories_to_check(output_dir: Path) -> tuple[str, ...]:
    """Return the directories of an output directory in which something may appear; at most 64.

    These are itself, our pins, and the newest directories at every depth, as they are now.
    """
    own = (str(output_dir), str(output_dir / SPOOL / "pins"))
    return (*own, *islice(_below(output_dir, 1), _MOST_CHECKED - len(own)))


def _below(folder: Path, depth: int) -> Iterator[str]:
    """Yield the containers and the newest folders, and what is in them."""
    found: list[tuple[int, str]] = []
    # gone, or not ours to read: a scan says so
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(("_", ".")):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    names = [name for _, name in sorted(found, reverse=True)]
    known = [name for name in names if name in _CONTAINERS or name.startswith("run-")][:_NEWEST]
    known = known if depth == 1 else []
    newest = [name for name in names if name not in known][:_NEWEST]
    for name in (*known, *newest):
        yield str(folder / name)
        if depth < _DEEPEST:
            yield from _below(folder / name, depth + 1)
