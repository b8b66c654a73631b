"""How a file of an fsspec back end gets its name in one step.

Google's and Azure's objects appear when the file is closed (read in gcsfs 2026.10 and adlfs 2026.8: a resumable upload is finalised, a block list
committed); closing is also what a file does that is forgotten half written, so that one is discarded first.  Elsewhere the bytes go to a temporary
name, which is then moved.  Where moving is fsspec's own, which copies and deletes, half a copy could be seen: there nothing is written, unless the server
copies objects whole.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import StoreError
from ckptsync.records.names import OURS

UNFINISHED = f"{OURS}/unfinished/"
BLOCK = 8 << 20
ON_CLOSE = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
WHOLE_COPIES = frozenset({"memory", "oss", "oci", "tos", "tosfs"})  # stores of objects, and a dictionary
DAV = frozenset({"webdav", "dav"})


@dataclass(frozen=True, slots=True)
class Job:
    """``path`` is to be written, below ``root``; ``told`` sorts errors; ``last`` is the last look before the name is given.

    ``replaces``: a file that has the name may go.
    """

    fs: Any
    root: str
    path: str
    pieces: Iterator[memoryview]
    told: Callable[[Exception], StoreError]
    last: Callable[[], None]
    replaces: bool

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What the file system raises within is sorted; what the pieces raise does not belong within."""
        try:
            yield
        except Exception as e:
            raise self.told(e) from e


Way = Callable[[Job], None]


def way_of(scheme: str, fs: Any) -> Way:
    """How to write there."""
    if scheme in ON_CLOSE:
        return _on_close
    if scheme in DAV:
        return _by_put_and_move
    if scheme in WHOLE_COPIES or _has_own_move(fs):
        return _by_move
    return _not_at_all


def _has_own_move(fs: Any) -> bool:
    from fsspec import AbstractFileSystem  # noqa: PLC0415 - an extra, which is there if a file system of its is
    from fsspec.asyn import AsyncFileSystem  # noqa: PLC0415

    while type(fs).__name__ == "DirFileSystem":
        fs = fs.fs
    return type(fs).mv not in (AbstractFileSystem.mv, AsyncFileSystem.mv)


def _on_close(job: Job) -> None:
    with job.telling():
        file = job.fs.open(job.path, "wb", block_size=BLOCK)
    try:
        _fill(job, file)
        job.last()
        with job.telling():
            file.close()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            file.discard()
        file.closed = True  # else it would be closed, and so stored, when it is collected
        raise


def _by_move(job: Job) -> None:
    def fill(part: str) -> None:
        with job.telling():
            file = job.fs.open(part, "wb", block_size=BLOCK)
        try:
            _fill(job, file)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                file.close()
            raise
        with job.telling():
            file.close()

    _through(job, fill, lambda part: job.fs.mv(part, job.path))


def _fill(job: Job, file: Any) -> None:
    for piece in job.pieces:
        with job.telling():
            file.write(piece)


def _by_put_and_move(job: Job) -> None:
    """webdav4's file for writing keeps everything on a local disk until it is closed, and its ``mv`` copies: so its client is asked."""
    client = job.fs.client

    def fill(part: str) -> None:
        source = _Source(job.pieces)
        try:
            with job.telling():
                client.upload_fileobj(source, part, overwrite=True, chunk_size=1 << 20)
        except StoreError:
            if source.error:
                raise source.error from None
            raise

    _through(job, fill, lambda part: client.move(part, job.path, overwrite=job.replaces))


def _not_at_all(job: Job) -> None:
    raise StoreError(
        f"{job.path}: a store of this kind cannot give a file its name in one step, so nothing is written to it",
        hint="readers would take half a file for a whole one; a path, s3:// and sftp:// are written safely",
    )


def _through(job: Job, fill: Callable[[str], None], move: Callable[[str], object]) -> None:
    """By way of a temporary name, which is never listed."""
    part = f"{job.root}/{UNFINISHED}{secrets.token_hex(8)}.part"
    with job.telling():
        job.fs.makedirs(part.rpartition("/")[0], exist_ok=True)
    try:
        fill(part)
        job.last()
        with job.telling():
            job.fs.makedirs(job.path.rpartition("/")[0] or "/", exist_ok=True)
            _move(job, part, move)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell; what is left is never listed
            job.fs.rm_file(part)
        raise


def _move(job: Job, part: str, move: Callable[[str], object]) -> None:
    """Onto a name that may be taken: HDFS and SMB refuse that, so the old file goes first, as WebDAV's servers have it go (RFC 4918, 9.9.3)."""
    try:
        move(part)
    except Exception:
        if not (job.replaces and job.fs.isfile(job.path) and job.fs.isfile(part)):
            raise
        job.fs.rm_file(job.path)
        move(part)


class _Source(io.RawIOBase):
    """The pieces as a file that is read front to back; ``error`` is what they raised, however the reader tells it."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")
        self.error: BaseException | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        try:
            while not self._rest:
                self._rest = next(self._pieces)
        except StopIteration:
            return 0
        except BaseException as e:
            self.error = e
            raise
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
