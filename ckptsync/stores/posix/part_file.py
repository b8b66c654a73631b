"""A new file under a temporary name until it is whole.

A later writer of the same content continues it where a killed one left it.

What is found is read and compared with what comes, so that it needs no journal and no trust,
whatever a power cut or another program made of it. `Filled` takes its chunks front to back,
`Placing` in any order and from several threads.
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
from dataclasses import dataclass

from blake3 import blake3

from ckptsync import safe_open
from ckptsync.errors import CkptsyncError, Corrupt, Transient
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import Chunk
from ckptsync.stores.limits import RateLimiter, limit
from ckptsync.stores.oserrors import StoreErrors

LET_GO = 32 << 20
"""Bytes after which what was written through the cache is dropped from it: the disk begins with it
at once, and memory is left to others.
"""
BLOCK = 4 << 10  # what a disk addresses, at most
WORTH = 256 << 10  # bytes of a chunk below which waiting for the disk costs more than the cache
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
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


@dataclass(slots=True)
class Draft:
    """The file ``part`` in the directory ``at``, both open.

    ``left``: bytes that an earlier writer left. ``may_stay``: the next writer of this content finds
    it.
    """

    at: int
    part: str
    fd: int
    left: int = 0
    may_stay: bool = False

    def close(self) -> os.stat_result:
        """Return what the file is; raise OSError if its bytes may be lost, as NFS tells with close.

        The lock lasts until `release`.
        """
        made = os.fstat(self.fd)
        closing, self.fd = self.fd, os.dup(self.fd)
        os.close(closing)
        return made

    def release(self) -> None:
        """Let another writer have what is left, and close the directory."""
        for fd in (self.fd, self.at):
            with contextlib.suppress(OSError):  # what counts was closed before
                os.close(fd)

    def remove(self) -> None:
        """Remove the file."""
        # there is a first error to tell; what is left is never listed
        with contextlib.suppress(OSError):
            os.unlink(self.part, dir_fd=self.at)


class Filled:
    """Appends chunks to a draft, at a ``pace``; those that it has already are compared instead.

    Raises OSError.

    A large file's bytes go to the disk directly where they can (`O_DIRECT`): copying them into the
    page cache costs more time than anything else that is done with them, and pushes what the
    trainer and others read out of memory. Elsewhere they are dropped from the cache as they are
    written.
    """

    def __init__(self, draft: Draft, pace: RateLimiter | None = None) -> None:
        self._fd, self._pace, self._found = draft.fd, pace, draft.left
        # so that what follows begins where the disk expects it
        self._left = draft.left - draft.left % BLOCK
        self._buffer = bytearray(min(_COMPARED, self._left))
        self._written = self._dropped = 0
        self._flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self._may_be_direct = is_on_disk(self._fd)

    def add(self, chunk: Chunk) -> None:
        """Append all of it. Nothing is durable before `sync`."""
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        while view and self._written < self._left:
            piece = view[: min(_COMPARED, self._left - self._written)]
            count = safe_open.read_at(
                self._fd, self._written, memoryview(self._buffer)[: len(piece)]
            )
            # of a bytearray: memoryviews are compared byte by byte in Python's own arithmetic,
            # forty times as slowly
            if (self._buffer if count == len(self._buffer) else self._buffer[:count]) != piece:
                self._left = 0
                break
            self._written = os.lseek(self._fd, self._written + len(piece), os.SEEK_SET)
            view = view[len(piece) :]
        for piece in [view] if self._pace is None else limit([view], self._pace):
            self._append(piece)

    def sync(self) -> None:
        """Return when everything is on the disk, and nothing behind it."""
        if self._found > self._written:
            os.ftruncate(self._fd, self._written)
        os.fsync(self._fd)
        if self._found:
            # what was compared is in memory, which others want more
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _append(self, view: memoryview) -> None:
        size = len(view) - len(view) % BLOCK
        before = self._written
        if self._may_be_direct and size >= WORTH and self._written % BLOCK == 0:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)
                self._write(view[:size])
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                # this file system cannot, or the caller's memory does not begin where it should
                self._may_be_direct = False
            finally:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
        if (rest := view[self._written - before :]).nbytes:
            self._write(rest)
            if self._written - self._dropped >= LET_GO:
                os.posix_fadvise(self._fd, 0, self._written, os.POSIX_FADV_DONTNEED)
                self._dropped = self._written

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.write(self._fd, view[done:])
            done += count
            self._written += count


def is_on_disk(fd: int) -> bool:
    """Return whether a block device of this machine holds the file.

    Network file systems, and those that check what they store, have devices without a number; they
    do better with a cache in between.
    """
    return os.major(os.fstat(fd).st_dev) != 0


def begun(at: int, name: str, origin: str) -> Draft:
    """Return a draft of ``name`` in the directory ``at``, for the caller to release.

    With an ``origin`` it is what the last writer of that origin left, if there is one.  Raises
    OSError.
    """
    if origin and (found := _continued(at, part_of(name, origin))):
        return found
    part = f".ckptsync-{secrets.token_hex(8)}.part"
    return Draft(os.dup(at), part, os.open(part, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at))


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
        left, named = (os.stat(one, dir_fd=at, follow_symlinks=False) for one in (part, last))
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


def _continued(at: int, part: str) -> Draft | None:
    """Return what the last writer left.

    ``None`` where somebody else has it now, or where there are no locks to tell.
    """
    is_new = False
    try:
        try:
            fd = os.open(part, _FLAGS, dir_fd=at)
        except FileNotFoundError:
            fd, is_new = os.open(part, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at), True
    except (FileExistsError, PermissionError):
        return None  # made by somebody else in this moment, or another user's
    draft = Draft(os.dup(at), part, fd, may_stay=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_free(at, part, os.fstat(fd)):
            draft.left = os.fstat(fd).st_size
            return draft
    except OSError as e:
        if is_new and e.errno != errno.EWOULDBLOCK:
            draft.remove()  # nobody would go on with it
        if e.errno not in _NO_LOCK:
            draft.release()
            raise
    draft.release()
    return None


def _is_free(at: int, part: str, found: os.stat_result) -> bool:
    """Return whether the locked file is still a draft, and ours to write to.

    Its writer holds the lock until the file has its name.
    """
    try:
        there = os.stat(part, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if (
        not os.path.samestat(found, there)
        or not stat.S_ISREG(found.st_mode)
        or found.st_uid != os.geteuid()
    ):
        return False
    if found.st_nlink > 1:
        os.unlink(part, dir_fd=at)  # it has its name: its writer was killed a moment later
    return found.st_nlink == 1


class Placing:
    """A new file that `commit` publishes under ``name``, and that `give_up` leaves unpublished.

    Raises StoreError.

    ``left``: so many bytes an earlier try has left, holes among them.
    """

    def __init__(
        self,
        name: str,
        size: int,
        draft: Draft,
        errors: StoreErrors,
        commit: Callable[[Draft], None],
    ) -> None:
        self.name, self.size = name, size
        self.left = min(size, draft.left)
        self._draft, self._errors, self._commit = draft, errors, commit
        self._lock = threading.Lock()
        self._is_over = False
        # another descriptor of the file, for writing past the page cache, where that can be
        self._direct = -1
        with self._errors.about(name):
            if draft.left != size:
                os.ftruncate(draft.fd, size)
            if size >= WORTH and is_on_disk(draft.fd):
                # no /proc, or a file system that cannot: through the cache, then
                with contextlib.suppress(OSError):
                    self._direct = os.open(f"/proc/self/fd/{draft.fd}", os.O_WRONLY | os.O_DIRECT)

    def read_at(self, start: int, out: memoryview) -> None:
        """Read what an earlier try has left there; holes are zeros."""
        with self._errors.about(self.name):
            safe_open.read_at(self._draft.fd, start, out)

    def write_at(self, start: int, view: memoryview) -> None:
        """Write all of it, past the page cache where that is quicker."""
        with self._errors.about(self.name):
            if self._direct >= 0 and not (start % BLOCK or len(view) % BLOCK):
                try:
                    _write(self._direct, start, view)
                except OSError as e:
                    if e.errno != errno.EINVAL:
                        raise
                else:
                    # else: this file system cannot, or the memory does not begin where it should
                    return
            _write(self._draft.fd, start, view)

    def drop_cache(self, start: int, size: int) -> None:
        """Drop a written range from the page cache.

        The disk may begin to write it, and the memory is left to others.
        """
        with self._errors.about(self.name):
            os.posix_fadvise(self._draft.fd, start, size, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """The file is whole: on return it is durable, and under its name."""
        try:
            with self._errors.about(self.name):
                os.fsync(self._draft.fd)
                self._commit(self._draft)
        except BaseException as e:
            self.give_up(e)
            raise
        if self._is_first():
            self._draft.release()

    def give_up(self, error: BaseException) -> None:
        """Leave what is there for the next try if that may end better, as after an interruption.

        May be called again.
        """
        if not self._is_first():
            return
        if not self._draft.may_stay or (
            isinstance(error, CkptsyncError) and not isinstance(error, Transient)
        ):
            self._draft.remove()
        self._draft.release()

    def _is_first(self) -> bool:
        """Return whether this call ends it."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and self._direct >= 0:
            safe_open.close_quietly(self._direct)  # what counts is the other descriptor's
        return is_first


def _write(fd: int, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
