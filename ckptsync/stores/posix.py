"""A store in a directory: a local disk, or NFS.

Writing: a new file under a temporary name in the same directory, its bytes, fsync, close, then one step that gives it its name
(rename replaces, link refuses), then fsync of the directory.  Killed anywhere, there is the old file or the new one, and at
most a temporary one, which is never listed.  Recommended reading: sqlite.org/atomiccommit.html.

NFS: errors of earlier writes come with fsync and close, so both count.  The reply to a link may be lost and the link be there
all the same: the temporary file's link count tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckptsync.errors import Corrupt, Exists, NotFound, StoreError
from ckptsync.paths import checked_path
from ckptsync.stores import beneath
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, announced, checked_prefix
from ckptsync.stores.openfiles import OpenFile, OpenFiles
from ckptsync.stores.oserrors import HINTS, store_error, told_of
from ckptsync.stores.writing import Output

TRUSTED_S = 30.0  # after so long an open file is opened by its name again: somebody may have replaced it
_TRIES = 8  # each lost to another process that deleted the same empty directory in between
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NO_LINKS_HERE = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_RENAME_NOREPLACE = 1


def is_unfinished(part: str) -> bool:
    """Whether a file's last name is that of a write that is going on, or was killed."""
    return part.startswith(".ckptsync-") and part.endswith(".part")


class PosixStore:
    """Files beneath ``root``, which must exist: a file system that is not mounted is not an empty store.

    The directory that a file system was mounted on does exist, so a ``witness`` may be named: a file that is in the store for ever.
    Without the one that was there at the beginning nothing is listed, written or said to be missing.
    """

    late = 0.0
    is_exclusive = True

    def __init__(self, root: str, witness: str = "") -> None:
        self.root = str(Path(root).absolute())
        self.url = self.root
        self._files = OpenFiles(lambda name: beneath.open_file(self.root, name))
        self._synced: set[str] = set()  # directories whose own names are known to be durable
        self._witness, self._time = witness, 0
        if witness:
            self._look()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        self._files.forget_older(TRUSTED_S)
        self._look()
        try:
            for name, found in beneath.walk(self.root, checked_prefix(prefix), is_unfinished):
                yield Entry(name, found.st_size, found.st_mtime)
        except OSError as e:
            raise store_error(str(e.filename or self.root), e) from e

    def size(self, name: str) -> int:
        """As the contract says."""
        with self._reading(_checked(name)):
            return beneath.stat_file(self.root, name).st_size

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        with self._reading(_checked(name)):
            file = self._files.get(name)
            if _is_stale(file):
                file = self._files.reopen(name)
            count = file.read_at(start, out)
        if count < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + count}, {out.nbytes} bytes from {start} wanted")

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._publish(
            _checked(name), announced(chunks, about), lambda at, part, last: os.rename(part, last, src_dir_fd=at, dst_dir_fd=at)
        )

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        with contextlib.suppress(NotFound):
            self.size(name)
            raise Exists(f"{name}: already there")
        self._publish(_checked(name), announced(chunks, about), _claim)

    def delete(self, name: str) -> None:
        """As the contract says.  Directories that this leaves empty go too: trainers take a directory for a checkpoint."""
        try:
            with self._reading(_checked(name)):
                beneath.stat_file(self.root, name)
                with beneath.parent_of(self.root, name) as (at, last):
                    os.unlink(last, dir_fd=at)
        except NotFound:
            return
        self._files.forget(name)
        with told_of(name):
            self._after_delete(name.split("/")[:-1])

    def _publish(self, name: str, chunks: Iterable[Chunk], commit: Callable[[int, str, str], None]) -> None:
        *way, last = name.split("/")
        with told_of(name):
            at, part, fd = self._begin(way)
        try:
            try:
                _write_out(name, fd, chunks)
                with told_of(name):
                    commit(at, part, last)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell; what is left is never listed
                    os.unlink(part, dir_fd=at)
                raise
            finally:
                self._files.forget(name)
            with told_of(name):
                _sync_directory(at)
        finally:
            os.close(at)

    def _begin(self, way: list[str]) -> tuple[int, str, int]:
        """The directory, and in it a new file under a temporary name."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # another process deleted a directory that was still empty
                at = self._make_way(way)
                part = f".ckptsync-{secrets.token_hex(8)}.part"
                try:
                    return at, part, os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=at)
                except BaseException:
                    os.close(at)
                    raise
        raise StoreError(f"{'/'.join(way)}: deleted by somebody else {_TRIES} times while it was made")

    def _make_way(self, way: list[str]) -> int:
        self._look()
        at = os.open(self.root, _DIRECTORY)
        for n, part in enumerate(way):
            try:
                below = self._step(at, part, "/".join(way[: n + 1]))
            finally:
                os.close(at)
            at = below
        return at

    def _step(self, at: int, part: str, path: str) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=at)
            self._synced.discard(path)
        if path not in self._synced:  # also where another writer made it a moment ago and may be killed before its own fsync
            _sync_directory(at)
            self._synced.add(path)
        return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)

    def _after_delete(self, way: list[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # gone, with everything in it
            at = beneath.open_directory(self.root, way, _DIRECTORY)
            try:
                _sync_directory(at)
            finally:
                os.close(at)
        while way:
            self._synced.discard("/".join(way))
            try:
                with beneath.parent_of(self.root, "/".join(way)) as (at, last):
                    os.rmdir(last, dir_fd=at)
            except OSError:
                return  # not empty, or not ours to delete: an empty directory does no harm
            way = way[:-1]

    def _look(self) -> None:
        """Raises StoreError if there is no root: a missing root must never read as an empty store."""
        try:
            os.close(os.open(self.root, beneath.PASS))
            time_ = beneath.stat_file(self.root, self._witness).st_mtime_ns if self._witness else 0
        except OSError as e:
            hint = HINTS.get(e.errno or 0, "is the file system mounted?  A store is made by the first worker or push")
            raise StoreError(f"{self.root}: {e.strerror}, a store's directory wanted", hint=hint) from e
        self._time = self._time or time_
        if time_ != self._time:
            raise StoreError(f"{self.root}: not the store that was opened", hint="is the file system mounted?  Then start again")

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno == errno.ESTALE:
                self._files.forget(name)
            if not beneath.is_absence(e):
                raise store_error(name, e) from e
            self._look()
            raise NotFound(f"{name}: not in {self.root}") from e


def _checked(name: str) -> str:
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


def _write_out(name: str, fd: int, chunks: Iterable[Chunk]) -> None:
    """All chunks, durable; closes ``fd`` whatever happens.  An OSError of ``chunks`` itself is not the store's."""
    try:
        with told_of(name):
            output = Output(fd)
        for chunk in chunks:
            with told_of(name):
                output.add(chunk)
        with told_of(name):
            output.sync()
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.close(fd)
        raise
    with told_of(name):
        os.close(fd)


def _claim(at: int, part: str, last: str) -> None:
    """Give the temporary file its name, unless the name is taken."""
    try:
        os.link(part, last, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except FileExistsError:
        if os.stat(part, dir_fd=at).st_nlink != 2:  # else it was our link, and only the server's reply was lost
            _sync_directory(at)  # so that what is said to be there is still there after a power cut
            raise
    except OSError as e:
        if e.errno not in _NO_LINKS_HERE:
            raise
        _rename_if_free(at, part, last)
        return
    os.unlink(part, dir_fd=at)


def _rename_if_free(at: int, part: str, last: str) -> None:
    """For file systems without hard links."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOTSUP, "neither hard links nor renameat2 here: a name cannot be claimed") from None
    if rename(at, os.fsencode(part), at, os.fsencode(last), _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        _sync_directory(at)
    raise OSError(code, f"neither hard links nor an exclusive rename here: {os.strerror(code)}")


def _sync_directory(at: int) -> None:
    try:
        os.fsync(at)
    except OSError as e:
        if e.errno != errno.EINVAL:  # the answer of file systems that have no such thing to do
            raise


def _is_stale(file: OpenFile) -> bool:
    """Whether the name may mean another file by now: this one was replaced or deleted, or has been open for long."""
    if time.monotonic() - file.since > TRUSTED_S:
        return True
    try:
        return file.links() == 0
    except OSError as e:
        if e.errno != errno.ESTALE:
            raise
        return True
