"""Write a file on an SFTP server under a temporary name, then rename it.

The temporary name is in the same directory; the rename publishes the file.

The temporary name of a large file is ``.ckptsync-<token>_<random>.part``.  The token is made of
name, origin and size, so the next writer of the same bytes finds what a killed one has left.  The
file's length says how much of it is there: no byte is written more than `TAIL` bytes beyond what
the server has brought to its disk, so whatever a kill or a power cut has left out lies in the last
`TAIL` bytes.  The next writer reads these back and compares them; of each part before, the first
bytes.

Two writers of one token (a service and a push on one node) write the same bytes into the same file,
as the same origin promises.  One of them publishes it.  The other one sees that it has gone
(Transient): no name is made twice, so it cannot be another file, without what was written before.
What it still had in flight lands in the published file, where the same bytes are.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.part_upload import FilePart, part_size
from ckptsync.stores.sftp.protocol import (
    FSYNC,
    RENAME_OVER,
    Attributes,
    Code,
    Flag,
    PacketType,
    Request,
    Session,
    StatusError,
    text,
)
from ckptsync.stores.sftp.server_files import ServerFiles

T = TypeVar("T")
PART = 8 << 20  # bytes of a file that are sent at once, over one of the connections
# bytes, and in parts; an earlier program's files have this one, so it may grow and never shrink
TAIL, _TAIL_PARTS = 128 << 20, 8
_STEP = 1 << 20  # bytes that are read back and compared at once
_FIRST = 64 << 10  # of a part: enough to see whether it was ever written


@dataclass(frozen=True, slots=True)
class SftpTarget:
    """A `PartTarget`: a name that is about to be written.

    ``replaces``: whatever is there; else the name must be free.
    """

    files: ServerFiles
    name: str
    about: About
    replaces: bool

    @property
    def directory(self) -> str:
        """The directory of the file, and of its temporary names."""
        return self.name.rpartition("/")[0]

    def put_whole(self, data: memoryview) -> None:
        """Write all of a small file, and publish it."""
        part = temporary_name(self.name, secrets.token_hex(8))
        try:
            self.publish(part, len(data), data)
        except Exception:
            # the first error is the one to raise, and what is left is never listed
            with contextlib.suppress(StoreError):
                self.files.remove(part)
            raise

    def begin(self) -> SftpUpload:
        """Return an upload that continues the file of an earlier writer, or makes a new one."""

        def step(session: Session) -> tuple[int, str, bool]:
            is_synced = FSYNC in session.extensions
            if left := self._left_files(session):
                return *max(left), is_synced
            part = temporary_name(self.name, f"{self._token}_{secrets.token_hex(8)}")
            with session.opened(self.files.path(part), Flag.WRITE | Flag.CREATE):
                return 0, part, is_synced

        size, part, is_synced = self.files.in_directory(self.directory, step, self.name)
        tail = max(TAIL, _TAIL_PARTS * part_size(self.about.size, least=PART))
        if not is_synced or self.about.size is None:  # parts of a file of unknown size grow
            tail = sys.maxsize
        return SftpUpload(self, part, size, max(0, size - tail), tail)

    def secure_name(self) -> None:
        """Make the existing file's name durable, and remove what other writers of it have left.

        The file's writer may have been killed.
        """
        directory = self.directory
        self.files.in_directory(directory, lambda s: self.files.sync(s, directory))
        if self.about.size is None or self.about.size > PART:
            for _, part in self.files.on(self.name, self._left_files):
                self.files.remove(part)

    @property
    def _token(self) -> str:
        words = f"{self.name}\0{self.about.origin}\0{self.about.size}"
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def _left_files(self, session: Session) -> list[tuple[int, str]]:
        """Return length and name of the unfinished files of the same bytes.

        Bytes of which the size is not known beforehand are not continued: their parts grow.
        """
        if not self.about.origin or self.about.size is None:
            return []
        start = temporary_name("", f"{self._token}_").removesuffix(".part")
        above = self.name.removesuffix(self.name.rpartition("/")[2])
        return [
            (entry.size, above + key)
            for key, entry in self.files.listing(session, self.directory).items()
            if key.startswith(start)
            and isinstance(entry, Attributes)
            and entry.size <= self.about.size
        ]

    def publish(self, part: str, size: int, data: memoryview | None = None) -> None:
        """Bring a temporary file to the disk, and rename it to its name, durably.

        ``data``: all of the file, which is written first; else ``size`` bytes are in the file.
        Requests that need no answer of each other share a round trip.

        Raises Exists; Transient where another writer has published the file.

        ``rename`` of version 3 refuses a name that is taken (filexfer-02, 6.5).  OpenSSH does it by
        a hard link, so that holds against other writers, too; another server may replace, therefore
        the name is looked at before.  ``posix-rename@openssh.com`` replaces in one step; a server
        without that extension can replace nothing: to remove first would leave nothing where a
        writer is killed in between.
        """
        was_tried, taken = False, Exists(f"{self.name}: already there")
        old, new = self.files.path(part), self.files.path(self.name)

        def step(session: Session) -> None:
            nonlocal was_tried
            content = data
            if was_tried:
                source, target = session.stat_paths([old, new])
                if source is None and target and target.is_file and target.size == size:
                    self.files.sync(session, self.directory)
                    return  # only the answer was lost
                if source is not None:
                    # It is whole, and may be published already: by a link whose other name is
                    # still there, or by a server that is slow.  So it is never written again.
                    content = None
            flags = Flag.WRITE if content is None else Flag.WRITE | Flag.CREATE | Flag.TRUNCATE
            with session.opened(old, flags) as handle:
                writes = () if content is None else session.write_requests(handle, 0, content)
                source, target = session.stat_paths(
                    [old, new], before=[*writes, *session.fsync_requests(handle)]
                )
            if target is not None and not self.replaces:
                raise taken
            # looked at by name: servers with caches know the size so
            if content is None and source is None:
                raise NotFound(part)
            if content is None and source and source.size != size:
                raise StoreError(
                    f"{self.files.shown(part)}: has {source.size} bytes where {size} were written"
                )
            in_one_step = self.replaces and RENAME_OVER in session.extensions
            if target is not None and not in_one_step:
                raise StoreError(
                    f"{self.files.shown(self.name)}: cannot be replaced, since the server has no"
                    f" {RENAME_OVER}",
                    hint="OpenSSH's sftp-server has it",
                )
            rename = Request(PacketType.RENAME, text(old) + text(new))
            if in_one_step:
                over = text(RENAME_OVER.encode()) + rename.fields
                rename = Request(PacketType.EXTENDED, over)
            was_tried = True
            try:
                self.files.sync(session, self.directory, rename)
            except StatusError as e:
                is_missing = e.code == Code.NO_SUCH_FILE
                if not (self.replaces or is_missing) and session.stat_paths([new]) != [None]:
                    raise taken from e
                raise

        try:
            if data is None:
                self.files.on(self.name, step)
            else:
                self.files.in_directory(self.directory, step, self.name)
        except Exists:
            # the name that is said to be there survives a power cut
            self.files.sync_directory(self.directory)
            raise
        except NotFound as e:
            raise _published_by_another(self.name) from e


class SftpUpload:
    """A `PartUpload`: a temporary file, of which an earlier writer had left ``size`` bytes.

    The first ``durable`` of them are on the server's disk.  No byte is written that lies more than
    ``tail`` bytes beyond what is on the disk; a thread that would do so waits.
    """

    def __init__(self, target: SftpTarget, part: str, size: int, durable: int, tail: int) -> None:
        self.target, self.part, self.left = target, part, size
        self._files, self._path = target.files, target.files.path(part)
        self._durable, self._trusted, self._tail = durable, durable, tail
        self._changed = threading.Condition()
        # bytes from the beginning that are in the file, and parts beyond them: from where to where
        self._whole = 0
        self._beyond: dict[int, int] = {}
        self._is_syncing = self._has_failed = False

    def is_there(self, part: FilePart) -> bool:
        """Return whether the file has these bytes already.

        It reads them back, since a server cannot compute a digest for us; of a part that is trusted
        the first ones.
        """
        end = part.start + len(part.data)
        if end > self.left:
            return False
        data = part.data[:_FIRST] if end <= self._trusted else part.data

        def is_same(session: Session) -> bool:
            with session.opened(self._path, Flag.READ) as handle:
                for at in range(0, len(data), _STEP):
                    expected = data[at : at + _STEP]
                    stored = bytearray(len(expected))
                    count = session.read_into(handle, part.start + at, memoryview(stored))
                    if count < len(expected) or stored != expected:
                        return False
            return True

        if not self._on(is_same):
            return False
        self._add(part)
        return True

    def put(self, part: FilePart) -> None:
        """Write a part, once it lies within the tail."""
        end = part.start + len(part.data)
        with self._changed:
            # also where the disk had lost bytes that were trusted
            self._durable = min(self._durable, part.start)
            self._changed.wait_for(lambda: self._has_failed or end <= self._durable + self._tail)
            if self._has_failed:
                return  # the error is another thread's

        def step(session: Session) -> None:
            with session.opened(self._path, Flag.WRITE) as handle:
                session.do(*session.write_requests(handle, part.start, part.data))

        self._on(step)
        self._add(part)

    def commit(self, size: int) -> None:
        """Make the file durable, and publish it."""
        self.target.publish(self.part, size)

    def abandon(self) -> None:
        """Remove the file: nobody will go on with it."""
        self._files.remove(self.part)

    def _add(self, part: FilePart) -> None:
        """Count a part that is in the file; bring the file to the disk after each half a tail."""
        end = part.start + len(part.data)
        with self._changed:
            self._beyond[part.start] = end
            while (end := self._beyond.pop(self._whole, 0)) > self._whole:
                self._whole = end
        while True:
            with self._changed:
                whole = self._whole
                if self._is_syncing or whole - self._durable < self._tail // 2:
                    return
                self._is_syncing = True
            self._on(self._sync)
            with self._changed:
                self._is_syncing, self._durable = False, whole
                self._changed.notify_all()

    def _sync(self, session: Session) -> None:
        with session.opened(self._path, Flag.WRITE) as handle:
            session.do(*session.fsync_requests(handle))

    def _on(self, step: Callable[[Session], T]) -> T:
        """Return what ``step`` returns, which never makes the file again: it would have holes.

        After an error no thread waits any longer.
        """
        try:
            return self._files.on(self.target.name, step)
        except BaseException as e:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            if isinstance(e, NotFound):
                raise _published_by_another(self.target.name) from e
            raise


def temporary_name(name: str, word: str) -> str:
    """Return a temporary name in the directory of ``name``."""
    directory, slash, _ = name.rpartition("/")
    return f"{directory}{slash}.ckptsync-{word}.part"


def _published_by_another(name: str) -> Transient:
    return Transient(
        f"{name}: another writer of the same file has published or removed what was written",
        hint="check that no two workers send the same files",
    )
