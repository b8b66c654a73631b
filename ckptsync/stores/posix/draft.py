"""A new file under a temporary name until it is whole.

A later writer of the same content continues it where a killed one left it.  What is found is read
and compared with what comes, so that it needs no journal and no trust, whatever a power cut or
another program made of it.
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

# Bytes after which the file is dropped from the page cache: the disk begins with them at once, and
# memory is left to others.
LET_GO = 32 << 20
BLOCK = 4 << 10  # what a disk addresses, at most
WORTH = 256 << 10  # bytes of a chunk below which waiting for the disk costs more than the cache
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = _FLAGS | os.O_CREAT | os.O_EXCL
_COMPARED = 1 << 20  # bytes at once
_NO_LOCK = frozenset(
    {errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
)


def is_unfinished(part: str) -> bool:
    """Whether a file's last name is that of a write that is going on, or was killed."""
    return part.startswith(".ckptsync-") and part.endswith(".part")


def checked_name(name: str) -> str:
    """Return ``name`` if it is a plain path, and not that of an unfinished write; raise Corrupt."""
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


class Draft:
    """A new file in the open directory ``at`` that `commit` publishes under ``name``.

    One thread appends chunks in order; or, after `resize`, several threads write anywhere.  With an
    ``origin`` it begins with what the last writer of that origin left: ``left`` bytes.  Then it
    ``may_stay`` for the next writer.

    A large file's bytes go to the disk directly where they can (`O_DIRECT`): copying them into the
    page cache costs more time than anything else that is done with them, and pushes what the
    trainer and others read out of memory.  Elsewhere they are dropped from the cache as they are
    written.

    To make one raises OSError; its methods raise StoreError about ``name``.  ``give_name`` is
    `publish.replace` or `publish.claim`; ``on_named`` is called once the file may have its name.
    """

    def __init__(
        self,
        at: int,
        name: str,
        origin: str,
        errors: StoreErrors,
        *,
        give_name: GiveName,
        on_named: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self._errors = name, errors
        self._give_name, self._on_named = give_name, on_named
        self._last = name.rpartition("/")[2]
        self._at = os.dup(at)
        try:
            handle = None
            if origin:
                self.part = part_of(self._last, origin)
                handle = _locked(at, self.part)
            self.may_stay = handle is not None
            if handle is None:
                self.part = f".ckptsync-{secrets.token_hex(8)}.part"
                handle = os.open(self.part, _NEW, 0o666, dir_fd=at), 0
        except BaseException:
            safe_open.close_quietly(self._at)
            raise
        self._fd, size = handle
        # another descriptor of the file, for writing past the page cache; opened when needed
        self._direct: int | None = None
        self._lock = threading.Lock()
        self._is_named = self._is_over = self._is_download = False
        self._end = self._cached = 0
        self.left = self._same = 0
        self._buffer = bytearray()
        self._begin_with(size)

    def share(self, share: Callable[[int], None]) -> None:
        """Let ``share`` give the empty file its content; what it raises is raised as it is."""
        share(self._fd)
        self._begin_with(os.fstat(self._fd).st_size)

    def resize(self, size: int) -> None:
        """Make the file ``size`` bytes long, with holes; what was ``left`` of them stays."""
        with self._errors.about(self.name):
            if self.left != size:
                os.ftruncate(self._fd, size)
        self.left, self._end, self._is_download = min(size, self.left), size, True

    def append(self, chunk: Chunk, pace: RateLimiter | None = None) -> None:
        """Append all of it, at a ``pace``; compare it instead where it was left here before."""
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        with self._errors.about(self.name):
            while view and self._end < self._same:
                piece = view[: min(_COMPARED, self._same - self._end)]
                count = safe_open.read_at(
                    self._fd, self._end, memoryview(self._buffer)[: len(piece)]
                )
                # of a bytearray: memoryviews are compared byte by byte in Python's own arithmetic,
                # forty times as slowly
                if (self._buffer if count == len(self._buffer) else self._buffer[:count]) != piece:
                    self._same = 0
                    break
                self._end += len(piece)
                progress_signs.count_sent(len(piece))
                view = view[len(piece) :]
                self._let_go(len(piece))
            for piece in [view] if pace is None else limit([view], pace):
                self._write(self._end, piece)
                self._end += len(piece)
                progress_signs.count_sent(len(piece))

    def read_at(self, start: int, out: memoryview) -> None:
        """Read what an earlier writer has left there; holes are zeros."""
        with self._errors.about(self.name):
            safe_open.read_at(self._fd, start, out)
            self._let_go(len(out))

    def write_at(self, start: int, view: memoryview) -> None:
        """Write all of it."""
        with self._errors.about(self.name):
            self._write(start, view)

    def commit(self) -> None:
        """Publish the file; on return it is durable, and so is its name.

        After an error `give_up` or `end` has to be called.
        """
        with self._errors.about(self.name):
            if self.left > self._end:
                os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
            if self._is_download or self.left:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # others need the memory
            made = os.fstat(self._fd)
            # NFS tells with close that bytes are lost; the lock lasts until `end`
            closing, self._fd = self._fd, os.dup(self._fd)
            os.close(closing)
            try:
                self._give_name(self._at, self.part, self._last, made)
                self._is_named = True
            finally:
                self._on_named()
            sync_directory(self._at)
        self.end(keep=False)

    def give_up(self, error: BaseException) -> None:
        """Leave what is there for the next try if that may end better, as after an interruption.

        May be called again.
        """
        self.end(keep=not isinstance(error, CkptsyncError) or isinstance(error, Transient))

    def end(self, *, keep: bool) -> None:
        """Close the file, and remove it if it has no name yet.

        With ``keep`` it stays for the next writer, where that one would find it.  May be called
        again.
        """
        with self._lock:
            is_over, self._is_over = self._is_over, True
        if is_over:
            return
        if not self._is_named and not (keep and self.may_stay):
            # there is a first error to tell; what is left is never listed
            with contextlib.suppress(OSError):
                os.unlink(self.part, dir_fd=self._at)
        for fd in (self._direct, self._fd, self._at):
            if fd is not None and fd >= 0:
                safe_open.close_quietly(fd)  # what counts was closed before

    def _begin_with(self, size: int) -> None:
        """Note how many bytes are in the file before the first one is written."""
        self.left = size
        # so that what follows begins where the disk expects it
        self._same = size - size % BLOCK
        self._buffer = bytearray(min(_COMPARED, self._same))

    def _write(self, start: int, view: memoryview) -> None:
        whole = len(view) - len(view) % BLOCK
        if whole >= WORTH and start % BLOCK == 0 and (direct := self._direct_descriptor()) >= 0:
            try:
                _write_all(direct, start, view[:whole])
                start, view = start + whole, view[whole:]
            except OSError as e:
                # this file system cannot, or the caller's memory does not begin where it should
                if e.errno != errno.EINVAL:
                    raise
        _write_all(self._fd, start, view)
        self._let_go(len(view))

    def _let_go(self, count: int) -> None:
        """Drop the file from the page cache each time `LET_GO` bytes have come there."""
        self._cached += count
        if self._cached >= LET_GO:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._cached = 0

    def _direct_descriptor(self) -> int:
        """Return a descriptor that writes past the page cache, or -1 where there can be none."""
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
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)


def is_on_disk(fd: int) -> bool:
    """Return whether a block device of this machine holds the file.

    Network file systems, and those that check what they store, have devices without a number; they
    do better with a cache in between.
    """
    return os.major(os.fstat(fd).st_dev) != 0


def part_of(name: str, origin: str) -> str:
    """Return the temporary name for a file's name and origin.

    The next writer of that content looks there for what the last one left.
    """
    return (
        f".ckptsync-{blake3(os.fsencode(name) + bytes(1) + os.fsencode(origin)).hexdigest(16)}.part"
    )


def clear(at: int, last: str, origin: str) -> None:
    """Remove the temporary name of a file that has its final name ``last`` too.  Raises OSError.

    Its writer was killed between the two steps. Else the temporary name would keep the disk space
    for ever.
    """
    part = part_of(last, origin)
    with contextlib.suppress(FileNotFoundError):
        left, named = (os.stat(name, dir_fd=at, follow_symlinks=False) for name in (part, last))
        if os.path.samestat(left, named):
            os.unlink(part, dir_fd=at)


def discard(root: str, name: str) -> bool:
    """Remove a draft whose writer holds no lock on it; return whether it is gone.

    Raises OSError.
    """
    try:
        fd = safe_open.open_file(root, name)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno not in _NO_LOCK or e.errno == errno.EWOULDBLOCK:
                    raise
                # else this file system has no locks, and the draft's age has to do
            safe_open.unlink(root, name)
        finally:
            os.close(fd)
    except BlockingIOError:
        return False
    except OSError as e:
        if not safe_open.is_absence(e):
            raise
    return True


def _locked(at: int, part: str) -> tuple[int, int] | None:
    """Return a descriptor of the file ``part``, new or left by the last writer, and its size.

    The descriptor holds a lock.  ``None`` where somebody else has it now, or where there are no
    locks to tell.
    """
    is_new = False
    try:
        try:
            fd = os.open(part, _FLAGS, dir_fd=at)
        except FileNotFoundError:
            fd, is_new = os.open(part, _NEW, 0o666, dir_fd=at), True
    except (FileExistsError, PermissionError):
        return None  # made by somebody else in this moment, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if _is_free(at, part, status):
            return fd, status.st_size
    except OSError as e:
        if is_new and e.errno != errno.EWOULDBLOCK:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=at)  # nobody would go on with it
        if e.errno not in _NO_LOCK:
            safe_open.close_quietly(fd)
            raise
    safe_open.close_quietly(fd)
    return None


def _is_free(at: int, part: str, of_draft: os.stat_result) -> bool:
    """Return whether the locked file is still a draft, and ours to write to.

    Its writer holds the lock until the file has its name.
    """
    try:
        of_name = os.stat(part, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if (
        not os.path.samestat(of_draft, of_name)
        or not stat.S_ISREG(of_draft.st_mode)
        or of_draft.st_uid != os.geteuid()
    ):
        return False
    if of_draft.st_nlink > 1:
        os.unlink(part, dir_fd=at)  # it has its name: its writer was killed a moment later
    return of_draft.st_nlink == 1
