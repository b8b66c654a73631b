"""A new file under a temporary name until it is whole.

A writer can be killed after hours, and a later writer of the same content should continue its file.
No journal tells how far the file is good after a power cut: the later writer reads what is there
and compares it with what it would write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable

from blake3 import blake3

from ckptsync import safe_open
from ckptsync.errors import CkptsyncError, Corrupt, Transient
from ckptsync.safe_names import checked_path
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import Chunk
from ckptsync.stores.limits import RateLimiter, limit
from ckptsync.stores.oserrors import StoreErrors
from ckptsync.stores.posix.publish import GiveName, sync_directory

# bytes after which the file is dropped from the page cache: the disk begins with them at once, and
# memory is left to others
DROP_EVERY = 32 << 20
BLOCK = 4 << 10  # what a disk addresses, at most
# bytes of a chunk below which waiting for the disk costs more than the cache
LEAST_DIRECT = 256 << 10
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = _FLAGS | os.O_CREAT | os.O_EXCL
_COMPARED = 1 << 20  # bytes at once
_NO_LOCK = frozenset(
    {errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
)


def is_unfinished(part: str) -> bool:
    """Return whether a file's last name is that of a draft."""
    return part.startswith(".ckptsync-") and part.endswith(".part")


def checked_name(name: str) -> str:
    """Return ``name`` if it is a plain path, and not that of a draft; raise Corrupt otherwise."""
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


class Draft:
    """A new file in an open directory that `commit` publishes under ``name``.

    One thread appends chunks in order; or, after `resize`, several threads write anywhere. With an
    ``origin`` it begins with the ``initial_size`` bytes of the origin's last writer, and
    ``may_stay`` for the next writer.

    A large file's bytes go to the disk directly where they can (`O_DIRECT`): copying them into the
    page cache costs more time than anything else that is done with them, and displaces what the
    trainer and others read. Elsewhere they are dropped from the cache as they are written.

    The constructor raises OSError; methods raise StoreError about ``name``.

    Args:
        directory_fd: the open directory; the draft keeps a descriptor of its own.
        name: the final path in the store; its last component is the file's name.
        origin: as `About` has it; "" for a draft that nobody continues.
        errors: makes the StoreErrors.
        give_name: `publish.replace` or `publish.claim`.
        on_named: called once the file may have its name, also if naming it failed.

    """

    def __init__(
        self,
        directory_fd: int,
        name: str,
        origin: str,
        errors: StoreErrors,
        *,
        give_name: GiveName,
        on_named: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self._errors = name, errors
        self._give_name, self._on_named = give_name, on_named
        self._last_name = name.rpartition("/")[2]
        self._directory_fd = os.dup(directory_fd)
        try:
            handle = None
            if origin:
                self.part = part_of(self._last_name, origin)
                handle = _open_locked(directory_fd, self.part)
            self.may_stay = handle is not None
            if handle is None:
                self.part = f".ckptsync-{secrets.token_hex(8)}.part"
                handle = os.open(self.part, _NEW, 0o666, dir_fd=directory_fd), 0
        except BaseException:
            safe_open.close_quietly(self._directory_fd)
            raise
        self._fd, size = handle
        # another descriptor of the file, for writing past the page cache; opened when needed
        self._direct: int | None = None
        self._lock = threading.Lock()
        self._is_named = self._is_over = self._is_download = False
        self._end = self._cached = 0
        self.initial_size = self._compared_end = 0
        self._buffer = bytearray()
        self._begin_with(size)

    def share(self, share: Callable[[int], None]) -> None:
        """Call ``share`` with the descriptor of the empty file, which gives it its content.

        That counts as an earlier writer's bytes. An error of ``share`` is raised unchanged.
        """
        share(self._fd)
        self._begin_with(os.fstat(self._fd).st_size)

    def resize(self, size: int) -> None:
        """Make the file ``size`` bytes long, with holes; earlier bytes up to there stay."""
        with self._errors.about(self.name):
            if self.initial_size != size:
                os.ftruncate(self._fd, size)
        self.initial_size, self._end, self._is_download = min(size, self.initial_size), size, True

    def append(self, chunk: Chunk, pace: RateLimiter | None = None) -> None:
        """Append a chunk, within the rate limit ``pace``; count its bytes as sent.

        Where an earlier writer has left bytes, the chunk is compared with them, without the limit,
        and written from the first difference on. One thread at a time.
        """
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        with self._errors.about(self.name):
            while view and self._end < self._compared_end:
                piece = view[: min(_COMPARED, self._compared_end - self._end)]
                count = safe_open.read_at(
                    self._fd, self._end, memoryview(self._buffer)[: len(piece)]
                )
                # of a bytearray: memoryviews are compared byte by byte in Python's own arithmetic,
                # forty times as slowly
                if (self._buffer if count == len(self._buffer) else self._buffer[:count]) != piece:
                    self._compared_end = 0
                    break
                self._end += len(piece)
                progress_signs.count_sent(len(piece))
                view = view[len(piece) :]
                self._drop_cached(len(piece))
            for piece in [view] if pace is None else limit([view], pace):
                self._write(self._end, piece)
                self._end += len(piece)
                progress_signs.count_sent(len(piece))

    def read_at(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the file's bytes from ``start`` on, as far as it goes.

        Holes are zeros.
        """
        with self._errors.about(self.name):
            safe_open.read_at(self._fd, start, out)
            self._drop_cached(len(out))

    def write_at(self, start: int, view: memoryview) -> None:
        """Write all of ``view`` at ``start``; threads may write at once after `resize`."""
        with self._errors.about(self.name):
            self._write(start, view)

    def commit(self) -> None:
        """Publish the file, and close it; on return the file and its name are durable.

        Bytes of an earlier writer beyond the last one are cut off. After an error the caller has to
        call `give_up` or `end`. Raise Exists if the name is taken and ``give_name`` is
        `publish.claim`.
        """
        with self._errors.about(self.name):
            if self.initial_size > self._end:
                os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            if self._is_download or self.initial_size:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # others need the memory
            status = os.fstat(self._fd)
            # NFS tells with close that bytes are lost; the lock lasts until `end`
            closing, self._fd = self._fd, os.dup(self._fd)
            os.close(closing)
            try:
                self._give_name(self._directory_fd, self.part, self._last_name, status)
                self._is_named = True
            finally:
                self._on_named()
            sync_directory(self._directory_fd)
        self.end(keep=False)

    def give_up(self, error: BaseException) -> None:
        """Close the file; leave it for the next try unless the error is final.

        An error is final if it is a CkptsyncError other than Transient; an interruption is not. May
        be called again.
        """
        self.end(keep=not isinstance(error, CkptsyncError) or isinstance(error, Transient))

    def end(self, *, keep: bool) -> None:
        """Close the file, and remove it if it has no name yet.

        With ``keep`` it stays for the next writer, if it has an origin. May be called again.
        """
        with self._lock:
            is_over, self._is_over = self._is_over, True
        if is_over:
            return
        if not self._is_named and not (keep and self.may_stay):
            # the first error is raised; a draft is never listed
            with contextlib.suppress(OSError):
                os.unlink(self.part, dir_fd=self._directory_fd)
        for fd in (self._direct, self._fd, self._directory_fd):
            if fd is not None and fd >= 0:
                safe_open.close_quietly(fd)  # what counts was closed before

    def _begin_with(self, size: int) -> None:
        """Note that an earlier writer left ``size`` bytes, and prepare their comparison."""
        self.initial_size = size
        # so that what follows begins where the disk expects it
        self._compared_end = size - size % BLOCK
        self._buffer = bytearray(min(_COMPARED, self._compared_end))

    def _write(self, start: int, view: memoryview) -> None:
        """Write all of ``view`` at ``start``, past the page cache where possible; raise OSError."""
        whole = len(view) - len(view) % BLOCK
        if (
            whole >= LEAST_DIRECT
            and start % BLOCK == 0
            and (direct := self._direct_descriptor()) >= 0
        ):
            try:
                _write_all(direct, start, view[:whole])
                start, view = start + whole, view[whole:]
            except OSError as e:
                # this file system cannot, or the caller's memory does not begin where it should
                if e.errno != errno.EINVAL:
                    raise
        _write_all(self._fd, start, view)
        self._drop_cached(len(view))

    def _drop_cached(self, count: int) -> None:
        """Drop the file from the page cache each time `DROP_EVERY` bytes have come there."""
        self._cached += count
        if self._cached >= DROP_EVERY:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._cached = 0

    def _direct_descriptor(self) -> int:
        """Return a descriptor that writes past the page cache, or -1 if the file cannot have one.

        The first call opens it.
        """
        with self._lock:
            if self._direct is None:
                self._direct = -1
                if is_on_disk(self._fd):
                    # no /proc, or a file system that cannot: through the cache, then
                    with contextlib.suppress(OSError):
                        self._direct = os.open(
                            f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_DIRECT
                        )
            return self._direct


def _write_all(fd: int, start: int, view: memoryview) -> None:
    """Write all of ``view`` at ``start``; raise OSError."""
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], start + written)


def is_on_disk(fd: int) -> bool:
    """Return whether a block device of this machine holds the file.

    Network file systems, and those that check what they store, have devices without a number; with
    them writing through the page cache is faster.
    """
    return os.major(os.fstat(fd).st_dev) != 0


def part_of(name: str, origin: str) -> str:
    """Return the temporary name for a file's name and origin, the same for each writer of them."""
    return (
        f".ckptsync-{blake3(os.fsencode(name) + bytes(1) + os.fsencode(origin)).hexdigest(16)}.part"
    )


def remove_leftover_name(directory_fd: int, last: str, origin: str) -> None:
    """Remove the temporary name of a file that has its final name ``last``, too; else nothing.

    Its writer was killed between the two steps; the temporary name would keep the disk space for
    ever. Raise OSError.
    """
    part = part_of(last, origin)
    with contextlib.suppress(FileNotFoundError):
        draft_status, named_status = (
            os.stat(name, dir_fd=directory_fd, follow_symlinks=False) for name in (part, last)
        )
        if os.path.samestat(draft_status, named_status):
            os.unlink(part, dir_fd=directory_fd)


def remove_unlocked(root: str, name: str) -> bool:
    """Remove a draft whose writer holds no lock on it; return whether it is gone.

    True if it was absent. Without locks in the file system nobody holds any. Raise OSError.
    """
    try:
        fd = safe_open.open_file(root, name)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno not in _NO_LOCK or e.errno == errno.EWOULDBLOCK:
                    raise
                # else this file system has no locks: the caller has checked the draft's age
            safe_open.unlink(root, name)
        finally:
            os.close(fd)
    except BlockingIOError:
        return False
    except OSError as e:
        if not safe_open.is_absence(e):
            raise
    return True


def _open_locked(directory_fd: int, part: str) -> tuple[int, int] | None:
    """Return a locked descriptor of the draft ``part``, made if missing, and its size: 0 if new.

    None if another writer or user has it, if it was published or removed meanwhile, or if there are
    no locks to tell. Raise OSError.
    """
    is_new = False
    try:
        try:
            fd = os.open(part, _FLAGS, dir_fd=directory_fd)
        except FileNotFoundError:
            fd, is_new = os.open(part, _NEW, 0o666, dir_fd=directory_fd), True
    except (FileExistsError, PermissionError):
        return None  # made by somebody else in this moment, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if _claim_draft(directory_fd, part, status):
            return fd, status.st_size
    except OSError as e:
        if is_new and e.errno != errno.EWOULDBLOCK:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=directory_fd)  # nobody would go on with it
        if e.errno not in _NO_LOCK:
            safe_open.close_quietly(fd)
            raise
    safe_open.close_quietly(fd)
    return None


def _claim_draft(directory_fd: int, part: str, draft_status: os.stat_result) -> bool:
    """Return whether the locked file is still the draft ``part``, and our user's.

    It is none if it has its final name already: its writer was killed before it removed the
    temporary name, which is removed here. Raise OSError.
    """
    try:
        named_status = os.stat(part, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if (
        not os.path.samestat(draft_status, named_status)
        or not stat.S_ISREG(draft_status.st_mode)
        or draft_status.st_uid != os.geteuid()
    ):
        return False
    if draft_status.st_nlink > 1:
        # it has its name: its writer was killed a moment later
        os.unlink(part, dir_fd=directory_fd)
    return draft_status.st_nlink == 1
