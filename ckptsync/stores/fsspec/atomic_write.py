"""How a file of an fsspec back end gets its name in one step.

Google's and Azure's objects appear when the file is closed (read in gcsfs 2026.10 and adlfs 2026.8:
a resumable upload is finalised, a block list committed); closing is also what a file does that is
forgotten half written, so that one is discarded first. Elsewhere the bytes go to a temporary name,
which is then moved. Where moving is fsspec's own, which copies and deletes, half a copy could be
seen: there nothing is written, unless the server copies objects whole.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import StoreError
from ckptsync.safe_names import RECORDS

UNFINISHED = f"{RECORDS}/unfinished/"
BLOCK = 8 << 20
ON_CLOSE = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
# stores of objects, and a dictionary
WHOLE_COPIES = frozenset({"memory", "oss", "oci", "tos", "tosfs"})
DAV = frozenset({"webdav", "dav"})


@dataclass(frozen=True, slots=True)
class WriteJob:
    """``path`` is to be written, below ``root``.

    ``sort_error`` makes a StoreError of any; ``last`` is the last look before the name is given.

    ``replaces``: a file that has the name may go.
    """

    fs: Any
    root: str
    path: str
    pieces: Iterator[memoryview]
    sort_error: Callable[[Exception], StoreError]
    last: Callable[[], None]
    replaces: bool

    @contextlib.contextmanager
    def sorting(self) -> Iterator[None]:
        """What the file system raises within is sorted.

        What the pieces raise does not belong within.
        """
        try:
            yield
        except Exception as e:
            raise self.sort_error(e) from e


Way = Callable[[WriteJob], None]


def way_of(scheme: str, fs: Any) -> Way:
    """How to write there."""
    if scheme in ON_CLOSE:
        return _on_close
    if scheme in DAV:
        return _by_put_and_move
    from fsspec import (  # noqa: PLC0415
        AbstractFileSystem,
    )
    from fsspec.asyn import AsyncFileSystem  # noqa: PLC0415

    while type(fs).__name__ == "DirFileSystem":
        fs = fs.fs
    has_own_move = type(fs).mv not in (AbstractFileSystem.mv, AsyncFileSystem.mv)
    return _by_move if scheme in WHOLE_COPIES or has_own_move else _not_at_all


def _on_close(job: WriteJob) -> None:
    with job.sorting():
        file = job.fs.open(job.path, "wb", block_size=BLOCK)
    try:
        _fill(job, file)
        job.last()
        with job.sorting():
            file.close()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            file.discard()
        file.closed = True  # else it would be closed, and so stored, when it is collected
        raise


def _by_move(job: WriteJob) -> None:
    def fill(part: str) -> None:
        with job.sorting():
            file = job.fs.open(part, "wb", block_size=BLOCK)
        try:
            _fill(job, file)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                file.close()
            raise
        with job.sorting():
            file.close()

    _through(job, fill, lambda part: job.fs.mv(part, job.path))


def _fill(job: WriteJob, file: Any) -> None:
    for piece in job.pieces:
        with job.sorting():
            file.write(piece)


def _by_put_and_move(job: WriteJob) -> None:
    """Upload through webdav4's client, then move the file to its name.

    webdav4's file for writing keeps all bytes on a local disk until it is closed, and its ``mv``
    copies: so this calls its client.
    """
    client = job.fs.client

    def fill(part: str) -> None:
        source = _ChunkFile(job.pieces)
        try:
            with job.sorting():
                client.upload_fileobj(source, part, overwrite=True, chunk_size=1 << 20)
        except StoreError:
            if source.error:
                raise source.error from None
            raise

    _through(job, fill, lambda part: client.move(part, job.path, overwrite=job.replaces))


def _not_at_all(job: WriteJob) -> None:
    raise StoreError(
        f"{job.path}: this kind of store cannot write a file atomically, so ckptsync does not"
        " write to it",
        hint=("readers could see a half-written file; use a path, s3:// or sftp:// instead"),
    )


def _through(job: WriteJob, fill: Callable[[str], None], move: Callable[[str], object]) -> None:
    """By way of a temporary name, which is never listed."""
    part = f"{job.root}/{UNFINISHED}{secrets.token_hex(8)}.part"
    with job.sorting():
        job.fs.makedirs(part.rpartition("/")[0], exist_ok=True)
    try:
        fill(part)
        job.last()
        with job.sorting():
            job.fs.makedirs(job.path.rpartition("/")[0] or "/", exist_ok=True)
            try:
                move(part)
            except Exception:
                # HDFS and SMB refuse a taken name: the old file goes first, as WebDAV's servers
                # have it go (RFC 4918, 9.9.3)
                if not (job.replaces and job.fs.isfile(job.path) and job.fs.isfile(part)):
                    raise
                job.fs.rm_file(job.path)
                move(part)
    except BaseException:
        # the first error is the one to tell; what is left is never listed
        with contextlib.suppress(Exception):
            job.fs.rm_file(part)
        raise


class _ChunkFile(io.RawIOBase):
    """The pieces as a file that is read front to back.

    ``error`` is what they raised, however the reader tells it.
    """

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
