"""Copies of what no link can hold, where the spool is another file system, or one without links.

From the first look on such a file is kept open, so that rotation takes its name and not its bytes.  It is copied by a thread once it has been
still for a second, or rotation has taken its name: a look never waits for bytes.  A copy appears whole, with the file's time, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.spool.folders import Tree, copy_of, is_folder, refusals
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat, look, open_file

STILL = 1.0  # seconds without a change
_MOST = 256  # files open at once; a process may often have no more than 1024
_STRETCH = 8 * 1024 * 1024  # bytes after which a stop is noticed


@dataclass(frozen=True, slots=True)
class Kept:
    """An open file, as it was seen last, and since when it has not changed.  ``lost``: its name is gone, nobody will find it again."""

    descriptor: int
    file: Stat
    since: float
    lost: bool = False


Key = tuple[Path, str]


class Copies:
    """What is on its way into pins.  Any thread may call; one thread of its own copies while there is something to copy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Key, Kept] = {}
        self._ready: list[Key] = []
        self._wrong: dict[Key, str] = {}
        self._names: dict[Path, frozenset[str]] = {}
        self._thread: threading.Thread | None = None

    def attend(self, pin: Pin, source: Path, files: Iterable[Stat], refused: Collection[str]) -> None:
        """Once a look: keep open what ``refused`` to be linked, and notice what changed, and what is gone, of what is kept.

        ``files``: all that lies in the source now.  Where something new stands, the missing was taken back, and is let go.
        """
        there = {f.path: f for f in files}
        with self._lock:
            mine = {key[1] for key in self._kept if key[0] == pin.path}
            is_writing = bool(there.keys() - self._names.get(pin.path, there.keys()))
            self._names[pin.path] = frozenset(there)
            for name in mine:
                self._notice((pin.path, name), there.get(name), is_writing=is_writing)
            for name in sorted(set(refused) & there.keys()):
                if (pin.path, name) not in self._kept and len(self._kept) < _MOST:
                    self._open((pin.path, name), source)

    def pending(self, pin: Pin) -> tuple[Stat, ...]:
        """What rotation has taken and no copy holds yet: without it the pin is no whole save."""
        with self._lock:
            return tuple(sorted(k.file for key, k in self._kept.items() if key[0] == pin.path and k.lost))

    def begin(self) -> None:
        """Copy what is still, in a thread.  What was refused before is tried again."""
        now = self._clock()
        with self._lock:
            self._ready = sorted(
                (key for key, kept in self._kept.items() if kept.lost or now - kept.since >= STILL),
                key=lambda key: (not self._kept[key].lost, self._kept[key].file.size),
            )
            if self._ready and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
                self._thread.start()

    def retain(self) -> None:
        """Let go of files of pins that are there no more."""
        with self._lock:
            for key in [k for k in self._kept if not is_folder(k[0])]:
                self._close(key)
            self._names = {path: names for path, names in self._names.items() if is_folder(path)}

    def problems(self) -> tuple[str, ...]:
        """Why something could not be copied; until it could be."""
        with self._lock:
            return tuple(dict.fromkeys(self._wrong.values()))

    def wait(self) -> None:
        """Until the thread has nothing more to do."""
        with self._lock:
            thread = self._thread
        if thread:
            thread.join()

    def _open(self, key: Key, source: Path) -> None:
        with contextlib.suppress(Incomplete):  # rotation was quicker
            fd = open_file(source, key[1])
            self._kept[key] = Kept(fd, look(fd, key[1]), self._clock())

    def _notice(self, key: Key, there: Stat | None, *, is_writing: bool) -> None:
        kept = self._kept[key]
        if there is None and is_writing:
            self._close(key)
        elif there is None:
            self._kept[key] = replace(kept, file=look(kept.descriptor, key[1]), lost=True)
        elif (there.device, there.inode) != (kept.file.device, kept.file.inode):
            self._close(key)  # another file under its name, which is opened next
        elif there != kept.file:
            self._kept[key] = replace(kept, file=there, since=self._clock())

    def _close(self, key: Key) -> None:
        os.close(self._kept.pop(key).descriptor)
        self._wrong.pop(key, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._ready:
                    self._thread = None
                    return
                key = self._ready.pop(0)
                kept = self._kept.get(key)
                descriptor = os.dup(kept.descriptor) if kept else -1  # so that it may be let go of meanwhile
            if kept:
                try:
                    self._finish(key, kept, descriptor)
                finally:
                    os.close(descriptor)

    def _finish(self, key: Key, kept: Kept, descriptor: int) -> None:
        try:
            is_whole = _copied(key[0], kept.file, descriptor)
        except Incomplete:  # the pin was dropped: the next look lets go of the file
            return
        except CkptsyncError as e:  # a full spool: it is told, and tried again with the next look
            with self._lock:
                self._wrong[key] = f"not copied, rotation may take it: {e}"
            return
        with self._lock:
            if is_whole and key in self._kept:
                self._close(key)


def _copied(pin: Path, file: Stat, descriptor: int) -> bool:
    """Whether there is a copy now.  Not of a file that changed meanwhile: a later try finds it still."""
    with refusals(pin), Tree(pin / "files") as tree, copy_of(descriptor, pin, *tree.place(file.path)) as out:
        _pour(descriptor, out.fileno(), file.size)
        os.utime(out.fileno(), ns=(file.mtime, file.mtime))
        found = look(descriptor, file.path)
        is_whole = found.size == file.size and found.mtime == file.mtime
        if not is_whole:
            out.close()
    return is_whole


def _pour(source: int, target: int, size: int) -> None:
    done = 0
    while done < size:
        count = os.sendfile(target, source, done, min(_STRETCH, size - done))
        if not count:
            return  # shorter than it was: it changed
        done += count
