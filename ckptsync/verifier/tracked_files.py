"""Read what is verified: count the bytes, report progress, remember which file was read last.

Layouts and libraries read through the `Files` protocol and do not say what they read. So
verification wraps their source: an error can then be blamed on the file that was read last, and a
report says how many bytes it rests on.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from ckptsync.errors import Incomplete, NotFound, StoreError
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.opening import directory_of
from ckptsync.stores.prefetch import PrefetchedFiles, is_near
from ckptsync.stores.stream import DEPTH, RangeSource, read_ahead, stream
from ckptsync.tensors import Extent, Files, FilesWrapper

WINDOW = 4 << 20
Sink = Callable[[memoryview], None]

NONE: Mapping[str, str] = {}
ReadProgress = Callable[[int], object]
"""Any thread calls it with bytes that were read; with 0, a child process is still at work."""


def no_progress(_: int) -> None:
    """Ignore progress."""


class ReadCounter:
    """Reports the sum of the bytes that were read, and of those that are expected.

    It is `VerifyOptions.progress`; its `expect` is `VerifyOptions.expect`.  Any thread may call it.
    """

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        """``progress`` gets the bytes read, and the total: see `_report`."""
        self._progress, self._lock = progress, threading.Lock()
        self._read = self._total = 0

    def __call__(self, size: int) -> None:
        """Count bytes that were read, and report; 0 is a child's sign of life, counted as one."""
        with self._lock:
            self._read += size or 1
            self._report()

    def expect(self, size: int) -> None:
        """Count bytes that will be read, each once, even if it is read twice; report."""
        with self._lock:
            self._total += size
            self._report()

    def _report(self) -> None:
        """Report bytes read, and the total: 0 while unknown, never less than was read."""
        self._progress(self._read, max(self._read, self._total) if self._total else 0)


class TrackedFiles(FilesWrapper):
    """Files of a checkpoint or model that remember what was read, and how findings name them.

    ``shown``: path → its name in findings. ``title``: the name of the whole in findings.
    ``tensors`` is counted by level parse.
    """

    def __init__(
        self,
        files: Files,
        title: str = "",
        shown: Mapping[str, str] = NONE,
        progress: ReadProgress = no_progress,
    ) -> None:
        """Wrap ``files``; ``progress`` gets the bytes of each read."""
        super().__init__(files)
        self.title, self._shown, self._progress = title, shown, progress
        self.reads: list[Extent] = []
        self.tensors = 0  # counted by level parse

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Read as `Files` says; remember the extent, also of a read that fails; report it after."""
        self.reads.append(Extent(name, start, out.nbytes))
        self._files.read_into(name, start, out)
        self._progress(out.nbytes)

    def close(self) -> None:
        """End the threads that read ahead, if there are any; nothing is read afterwards."""
        if isinstance(self._files, PrefetchedFiles):
            self._files.close()

    def show(self, path: str) -> str:
        """Return the name of a file in findings; of the whole for an empty path."""
        return self._shown.get(path, path) or self.title

    @property
    def read(self) -> int:
        """Return how many bytes were read; those read twice count twice."""
        return sum(extent.size for extent in self.reads)

    @property
    def seen(self) -> frozenset[str]:
        """Return the files of which something was read."""
        return frozenset(extent.file for extent in self.reads)

    @property
    def last(self) -> str:
        """Return the file read last, which an error is probably about; empty before the first."""
        return self.reads[-1].file if self.reads else ""


class CountedSource:
    """A store or directory that counts the bytes that were read, and reports them.  Thread-safe."""

    def __init__(self, source: RangeSource, progress: ReadProgress = no_progress) -> None:
        """Wrap ``source``; ``progress`` gets the bytes of each read, from one thread at a time."""
        self.source, self.read, self.progress = source, 0, progress
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Read as the source does, then count and report the bytes."""
        self.source.read_into(name, start, out)
        self._count(out)

    def stream(self, extent: Extent, buffer: memoryview, sink: Sink) -> None:
        """Send the bytes of an extent to ``sink``, through ``buffer``, each piece counted first."""

        def counted(view: memoryview) -> None:
            """Count the bytes, then send them on."""
            self._count(view)
            sink(view)

        stream(self.source, extent, buffer, counted)

    def track(self, files: Files, title: str, shown: Mapping[str, str] = NONE) -> TrackedFiles:
        """Return ``files`` that remember what was read, read ahead if this source is far.

        Close them to end their threads. Their reads are reported, but not counted in ``read``.
        """
        tracked = files if is_near(self.source) else PrefetchedFiles(files)
        return TrackedFiles(tracked, title, shown, self.progress)

    def _count(self, view: memoryview) -> None:
        """Add the bytes of a view, and report them; the lock is held meanwhile."""
        with self._lock:
            self.read += view.nbytes
            self.progress(view.nbytes)


def local_root(source: object) -> str | None:
    """Return the directory of this machine, or of a mount, with the files; None if elsewhere."""
    source = source.source if isinstance(source, CountedSource) else source
    return source.root if isinstance(source, DirectoryFiles) else directory_of(source)


def local_place(source: object, name: str) -> tuple[str, str] | None:
    """Return a directory of this machine and a file's name below it; None if it lies elsewhere."""
    source = source.source if isinstance(source, CountedSource) else source
    if isinstance(source, DirectoryFiles):
        return source.base_and_name(name)
    root = directory_of(source)
    return None if root is None else (root, name)


def pieces(source: RangeSource, extent: Extent) -> Iterator[memoryview]:
    """Yield the bytes of an extent in pieces of `WINDOW` bytes, read ahead if the source is far.

    Each piece is valid until the next. Raise StoreError, and Corrupt if the file is shorter.
    """
    inner = source.source if isinstance(source, CountedSource) else source
    depth = 0 if is_near(inner) else DEPTH
    return read_ahead(source, extent.file, extent.size, WINDOW, depth, first=extent.start)


def copy_to(file: IO[bytes], source: RangeSource, extent: Extent) -> None:
    """Append an extent to a temporary file, and flush it.

    Raise Incomplete if it is missing; StoreError, also if the copy cannot be written; Corrupt.
    """
    try:
        for piece in pieces(source, extent):
            file.write(piece)
        file.flush()
    except NotFound as e:
        raise Incomplete(f"{extent.file}: not found") from e
    except OSError as e:
        text = f"{extent.file}: cannot copy it to {tempfile.gettempdir()}"
        raise StoreError(f"{text}: {(e.strerror or str(e)).lower()}", hint="set TMPDIR") from e
