"""A new file under a temporary name, until it is whole: continued where a killed writer of the same content left it.

What is found is read and compared with what comes, so that it needs no journal and no trust, whatever a power cut or another program made of it.
`Filled` takes its chunks front to back, `Placing` in any order and from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from ckptsync.errors import CkptsyncError, Transient
from ckptsync.stores import beneath
from ckptsync.stores.contract import Chunk
from ckptsync.stores.limits import RateLimiter, limit
from ckptsync.stores.oserrors import Telling
from ckptsync.stores.writing import BLOCK, WORTH, Output, is_on_disk

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_COMPARED = 1 << 20  # bytes at once
_NO_LOCK = frozenset({errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def is_unfinished(part: str) -> bool:
    """Whether a file's last name is that of a write that is going on, or was killed."""
    return part.startswith(".ckptsync-") and part.endswith(".part")


@dataclass(slots=True)
class Draft:
    """``part`` in the directory ``at``.  ``left``: bytes that an earlier writer left.  ``may_stay``: the next one of this content finds it."""

    at: int
    part: str
    fd: int
    left: int = 0
    may_stay: bool = False

    def share(self, share: Callable[[int], None]) -> None:
        """Have the bytes of the source for those that an earlier writer left, where the file system lets files share them (XFS, btrfs, NFS 4.2)."""
        share(self.fd)
        self.left = os.fstat(self.fd).st_size

    def close(self) -> os.stat_result:
        """What the file is; raises OSError if its bytes may be lost, as NFS tells with close.  The lock lasts until `release`."""
        made = os.fstat(self.fd)
        closing, self.fd = self.fd, os.dup(self.fd)
        os.close(closing)
        return made

    def release(self) -> None:
        """Let another writer have what is left, and go of the directory."""
        for fd in (self.fd, self.at):
            with contextlib.suppress(OSError):  # what counts was closed before
                os.close(fd)

    def remove(self) -> None:
        """Make room."""
        with contextlib.suppress(OSError):  # there is a first error to tell; what is left is never listed
            os.unlink(self.part, dir_fd=self.at)


class Filled:
    """Chunks are appended to a draft, after its ``pace``; those that it has already are compared instead.  Nothing is durable before `sync`.  Raises OSError."""

    def __init__(self, draft: Draft, pace: RateLimiter | None = None) -> None:
        self._pace = pace
        self._fd, self._output, self._found = draft.fd, Output(draft.fd), draft.left
        self._left = draft.left - draft.left % BLOCK  # so that what follows begins where the disk wants it
        self._buffer = bytearray(min(_COMPARED, self._left))

    def add(self, chunk: Chunk) -> None:
        """All of it."""
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        while view and self._output.written < self._left:
            piece = view[: min(_COMPARED, self._left - self._output.written)]
            if not self._has(piece):
                self._left = 0
                break
            self._output.skip(len(piece))
            view = view[len(piece) :]
        if self._pace is None:
            self._output.add(view)
            return
        for piece in limit([view], self._pace):
            self._output.add(piece)

    def sync(self) -> None:
        """Everything is on the disk, and nothing behind it."""
        if self._found > self._output.written:
            os.ftruncate(self._fd, self._output.written)
        self._output.sync()
        if self._found:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what was compared is in memory, which others want more

    def _has(self, piece: memoryview) -> bool:
        count = beneath.read_at(self._fd, self._output.written, memoryview(self._buffer)[: len(piece)])
        there = self._buffer if count == len(self._buffer) else self._buffer[:count]
        return (
            there == piece
        )  # of a bytearray: memoryviews are compared byte by byte in Python's own arithmetic, forty times as slowly


def begun(at: int, name: str, origin: str) -> Draft:
    """A draft of ``name`` in the directory ``at``, for the caller to release: with an ``origin`` what its last writer left.  Raises OSError."""
    if origin and (found := _continued(at, part_of(name, origin))):
        return found
    part = f".ckptsync-{secrets.token_hex(8)}.part"
    return Draft(os.dup(at), part, os.open(part, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at))


def part_of(name: str, origin: str) -> str:
    """The temporary name under which the next writer of a content looks for what the last one left."""
    return f".ckptsync-{blake3(os.fsencode(name) + bytes(1) + os.fsencode(origin)).hexdigest(16)}.part"


def clear(at: int, last: str, origin: str) -> None:
    """Remove the second name of a file whose writer was killed right after it had given it ``last``: it would keep the room for ever.  Raises OSError."""
    part = part_of(last, origin)
    with contextlib.suppress(FileNotFoundError):
        left, named = (os.stat(one, dir_fd=at, follow_symlinks=False) for one in (part, last))
        if os.path.samestat(left, named):
            os.unlink(part, dir_fd=at)


def discard(root: str, name: str) -> bool:
    """Remove a draft whose writer holds no lock on it; whether it is gone.  Raises OSError."""
    try:
        fd = beneath.open_file(root, name)
        try:
            with _without_locks():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            beneath.unlink(root, name)
        finally:
            os.close(fd)
    except BlockingIOError:
        return False
    except OSError as e:
        if not beneath.is_absence(e):
            raise
    return True


@contextlib.contextmanager
def _without_locks() -> Iterator[None]:
    """Where a file system has none, a draft's age has to do."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.EWOULDBLOCK or e.errno not in _NO_LOCK:
            raise


def _continued(at: int, part: str) -> Draft | None:
    """``None`` where somebody else has it now, or where there are no locks to tell."""
    try:
        fd, is_new = _opened(at, part)
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


def _opened(at: int, part: str) -> tuple[int, bool]:
    """A descriptor, and whether the file is new."""
    try:
        return os.open(part, _FLAGS, dir_fd=at), False
    except FileNotFoundError:
        return os.open(part, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at), True


def _is_free(at: int, part: str, found: os.stat_result) -> bool:
    """Whether the file that we hold the lock of is still a draft, and ours to write to: who writes holds the lock until it has its name."""
    try:
        there = os.stat(part, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not os.path.samestat(found, there) or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if found.st_nlink > 1:
        os.unlink(part, dir_fd=at)  # it has its name: its writer was killed a moment later
    return found.st_nlink == 1


class Placing:
    """``name`` in a store, until `commit` or `give_up`.  ``left``: so many bytes an earlier try has left, holes among them.  Raises StoreError."""

    def __init__(self, name: str, size: int, draft: Draft, told: Telling, commit: Callable[[Draft], None]) -> None:
        self.name, self.size = name, size
        self.left = min(size, draft.left)
        self._draft, self._told, self._commit = draft, told, commit
        self._lock = threading.Lock()
        self._is_over = False
        with self._told.about(name):
            if draft.left != size:
                os.ftruncate(draft.fd, size)
            self._direct = _direct(draft.fd) if size >= WORTH else -1

    def read_at(self, start: int, out: memoryview) -> None:
        """What an earlier try has left there; holes are zeros."""
        with self._told.about(self.name):
            beneath.read_at(self._draft.fd, start, out)

    def write_at(self, start: int, view: memoryview) -> None:
        """All of it, past the page cache where that is quicker."""
        with self._told.about(self.name):
            if self._direct >= 0 and not (start % BLOCK or len(view) % BLOCK):
                try:
                    _write(self._direct, start, view)
                except OSError as e:
                    if e.errno != errno.EINVAL:
                        raise
                else:
                    return  # else: this file system cannot, or the memory does not begin where it should
            _write(self._draft.fd, start, view)

    def let_go(self, start: int, size: int) -> None:
        """What was written there is wanted no more: the disk may begin with it, and memory is left to others."""
        with self._told.about(self.name):
            os.posix_fadvise(self._draft.fd, start, size, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """It is whole: durable, and under its name, on return."""
        try:
            with self._told.about(self.name):
                os.fsync(self._draft.fd)
                self._commit(self._draft)
        except BaseException as e:
            self.give_up(e)
            raise
        if self._is_first():
            self._draft.release()

    def give_up(self, error: BaseException) -> None:
        """What is there stays for the next try if that may end better, as after an interruption.  May be called again."""
        if not self._is_first():
            return
        if not self._draft.may_stay or (isinstance(error, CkptsyncError) and not isinstance(error, Transient)):
            self._draft.remove()
        self._draft.release()

    def _is_first(self) -> bool:
        """Whether this call ends it."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and self._direct >= 0:
            with contextlib.suppress(OSError):  # what counts is the other descriptor's
                os.close(self._direct)
        return is_first


def _direct(fd: int) -> int:
    """Another descriptor of the file, for writing past the page cache; -1 where there is none."""
    if not is_on_disk(fd):
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return -1  # no /proc, or a file system that cannot: through the cache, then


def _write(fd: int, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
