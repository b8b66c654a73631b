"""Write a file on an SFTP server under a temporary name, then rename it to its own.

A killed upload must continue, and a server cannot compute digests of what it has. So the length of
the temporary file says how much is there, and only its end is compared.

The temporary name of a large file is ``.ckptsync-<token>_<random>.part``, in the file's directory.
The token is made of name, origin and size, so the next writer of the same bytes finds the file of a
killed one. No byte is written more than `TAIL` bytes beyond what the server has brought to its
disk, so bytes that a kill or a power cut has left out lie in the last `TAIL` bytes. The next writer
reads these back and compares them; of each part before, the first bytes.

Two writers of one token (a service and a push on one node) write the same bytes into the same file,
since the origin is the same. One of them publishes it. The other one finds it gone (Transient): no
name is made twice, so it cannot be another file, without the bytes that were written before. Bytes
that it still had in flight land in the published file, which has the same ones.
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
PART = 8 << 20  # bytes of a part, which one connection sends
# bytes of the tail that is compared, at least; files of earlier versions rely on it: never lower it
TAIL = 128 << 20
_TAIL_PARTS = 8  # parts of the tail, at least
_STEP = 1 << 20  # bytes that are read back and compared at once
_FIRST = 64 << 10  # bytes of a part that show whether it was ever written


@dataclass(frozen=True, slots=True)
class SftpTarget:
    """A `PartTarget`: a name that is about to be written.

    ``replaces``: a file that has the name is replaced; without it the name must be free.
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
        """Write all of a small file, and publish it; raise as `publish`.

        After an error the temporary file is removed, unless the server refuses.
        """
        part = temporary_name(self.name, secrets.token_hex(8))
        try:
            self.publish(part, len(data), data)
        except Exception:
            # the first error is the one to raise, and what is left is never listed
            with contextlib.suppress(StoreError):
                self.files.remove(part)
            raise

    def begin(self) -> SftpUpload:
        """Return an upload that continues the longest file of earlier writers, or begins a new one.

        A new file is made on the server, with its directories. Raise StoreError.
        """

        def step(session: Session) -> tuple[int, str, bool]:
            """Find or make an unfinished file; return size, name, and whether fsync works."""
            is_synced = FSYNC in session.extensions
            if unfinished := self._unfinished_files(session):
                return *max(unfinished), is_synced
            part = temporary_name(self.name, f"{self._token}_{secrets.token_hex(8)}")
            with session.opened(self.files.path(part), Flag.WRITE | Flag.CREATE):
                return 0, part, is_synced

        size, part, is_synced = self.files.in_directory(self.directory, step, self.name)
        tail = max(TAIL, _TAIL_PARTS * part_size(self.about.size, least=PART))
        if not is_synced or self.about.size is None:  # parts of a file of unknown size grow
            tail = sys.maxsize
        return SftpUpload(self, part, size, max(0, size - tail), tail)

    def secure_name(self) -> None:
        """Make an existing file's name durable, and remove temporary files of the same bytes.

        Its writer may have been killed before it did so. For files of up to `PART` bytes none are
        looked for. Raise StoreError.
        """
        directory = self.directory
        self.files.in_directory(directory, lambda s: self.files.sync(s, directory))
        if self.about.size is None or self.about.size > PART:
            for _, part in self.files.on(self.name, self._unfinished_files):
                self.files.remove(part)

    @property
    def _token(self) -> str:
        """The word in temporary names that is the same for writers of the same bytes."""
        words = f"{self.name}\0{self.about.origin}\0{self.about.size}"
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def _unfinished_files(self, session: Session) -> list[tuple[int, str]]:
        """Return length and name of each temporary file of the same bytes.

        Empty without an origin or a size: a file of unknown size is not continued, since its parts
        grow.
        """
        if not self.about.origin or self.about.size is None:
            return []
        token_start = temporary_name("", f"{self._token}_").removesuffix(".part")
        directory_prefix = self.name.removesuffix(self.name.rpartition("/")[2])
        return [
            (entry.size, directory_prefix + key)
            for key, entry in self.files.listing(session, self.directory).items()
            if key.startswith(token_start)
            and isinstance(entry, Attributes)
            and entry.size <= self.about.size
        ]

    def publish(self, part: str, size: int, data: memoryview | None = None) -> None:
        """Bring a temporary file to the server's disk, and rename it to its name, durably.

        ``part``: the temporary name. ``size``: bytes that the file has, or shall have. ``data``:
        all of them, if they are to be written first. Requests that do not need each other's answers
        share a round trip.

        Raise Exists if the name is taken and may not be replaced, Transient if another writer has
        published the file, StoreError.

        ``rename`` of version 3 refuses a name that is taken (filexfer-02, 6.5). OpenSSH does it by
        a hard link, so it excludes other writers, too; another server may replace, therefore the
        name is looked up before. ``posix-rename@openssh.com`` replaces in one step. A server
        without that extension can replace nothing: to remove first would leave nothing if the
        writer is killed in between.
        """
        was_tried, exists_error = False, Exists(f"{self.name}: already there")
        part_path, final_path = self.files.path(part), self.files.path(self.name)

        def step(session: Session) -> None:
            """Write what is missing, sync the file, and rename it, unless an earlier try did.

            Raise Exists, NotFound without the temporary file, StoreError.
            """
            nonlocal was_tried
            content = data
            if was_tried:
                source, target = session.stat_paths([part_path, final_path])
                if source is None and target and target.is_file and target.size == size:
                    self.files.sync(session, self.directory)
                    return  # only the answer was lost
                if source is not None:
                    # It is whole, and may be published already: by a link whose other name is
                    # still there, or by a server that is slow.  So it is never written again.
                    content = None
            flags = Flag.WRITE if content is None else Flag.WRITE | Flag.CREATE | Flag.TRUNCATE
            with session.opened(part_path, flags) as handle:
                writes = () if content is None else session.write_requests(handle, 0, content)
                source, target = session.stat_paths(
                    [part_path, final_path], before=[*writes, *session.fsync_requests(handle)]
                )
            if target is not None and not self.replaces:
                raise exists_error
            # looked at by name: servers with caches know the size so
            if content is None and source is None:
                raise NotFound(part)
            if content is None and source and source.size != size:
                raise StoreError(
                    f"{self.files.shown(part)}: has {source.size} bytes where {size} were written"
                )
            rename = self._rename_request(session, part_path, final_path, is_taken=bool(target))
            was_tried = True
            try:
                self.files.sync(session, self.directory, rename)
            except StatusError as e:
                is_missing = e.code == Code.NO_SUCH_FILE
                if not (self.replaces or is_missing) and session.stat_paths([final_path]) != [None]:
                    raise exists_error from e
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

    def _rename_request(
        self, session: Session, part_path: bytes, final_path: bytes, *, is_taken: bool
    ) -> Request:
        """Return the request that renames the temporary file; with `replaces`, over a file.

        Raise StoreError if the name is taken, and the server cannot replace a file in one step.
        Without `replaces` the caller has raised Exists for a name that is taken.
        """
        rename = Request(PacketType.RENAME, text(part_path) + text(final_path))
        if self.replaces and RENAME_OVER in session.extensions:
            return Request(PacketType.EXTENDED, text(RENAME_OVER.encode()) + rename.fields)
        if is_taken:
            raise StoreError(
                f"{self.files.shown(self.name)}: cannot be replaced, since the server has no"
                f" {RENAME_OVER}",
                hint="OpenSSH's sftp-server has it",
            )
        return rename


class SftpUpload:
    """A `PartUpload`: a temporary file, of which an earlier writer had left ``size`` bytes.

    The first ``durable`` of them are on the server's disk. No byte is written more than ``tail``
    bytes beyond that; a thread that would do so waits until the file was synced.
    """

    def __init__(self, target: SftpTarget, part: str, size: int, durable: int, tail: int) -> None:
        self.target, self.part, self.initial_size = target, part, size
        self._files, self._path = target.files, target.files.path(part)
        self._durable, self._trusted, self._tail = durable, durable, tail
        self._changed = threading.Condition()
        # the file has all bytes before this one, and parts beyond it: their ends by their starts
        self._contiguous = 0
        self._beyond: dict[int, int] = {}
        self._is_syncing = self._has_failed = False

    def reuse_part(self, part: FilePart) -> bool:
        """Return True, and count a part as sent, if the file has these bytes already.

        They are read back and compared; of a part that was on the server's disk before, only the
        first `_FIRST` bytes. Raise as `_run`.
        """
        end = part.start + len(part.data)
        if end > self.initial_size:
            return False
        data = part.data[:_FIRST] if end <= self._trusted else part.data

        def is_same(session: Session) -> bool:
            """Return whether the file has ``data`` at the part's place."""
            with session.opened(self._path, Flag.READ) as handle:
                for offset in range(0, len(data), _STEP):
                    expected = data[offset : offset + _STEP]
                    stored = bytearray(len(expected))
                    count = session.read_into(handle, part.start + offset, memoryview(stored))
                    if count < len(expected) or stored != expected:
                        return False
            return True

        if not self._run(is_same):
            return False
        self._count_part(part)
        return True

    def put(self, part: FilePart) -> None:
        """Wait until a part lies within the tail, then write it; sync the file after half a tail.

        Return without writing it, and without an error, if another thread failed. Raise as `_run`.
        """
        end = part.start + len(part.data)
        with self._changed:
            # a trusted part before may be written again, since the disk had lost it
            self._durable = min(self._durable, part.start)
            self._changed.wait_for(lambda: self._has_failed or end <= self._durable + self._tail)
            if self._has_failed:
                return  # the error is another thread's

        def step(session: Session) -> None:
            """Write the part into the file."""
            with session.opened(self._path, Flag.WRITE) as handle:
                session.do(*session.write_requests(handle, part.start, part.data))

        self._run(step)
        self._count_part(part)

    def commit(self, size: int) -> None:
        """Publish the file of ``size`` bytes; see `SftpTarget.publish`."""
        self.target.publish(self.part, size)

    def abandon(self) -> None:
        """Remove the file: nobody will continue it."""
        self._files.remove(self.part)

    def _count_part(self, part: FilePart) -> None:
        """Note that a part is in the file; sync the file after each half of a tail.

        One thread syncs at a time, and wakes those that wait for it in `put`. Raise as `_run`.
        """
        end = part.start + len(part.data)
        with self._changed:
            self._beyond[part.start] = end
            while (end := self._beyond.pop(self._contiguous, 0)) > self._contiguous:
                self._contiguous = end
        while True:
            with self._changed:
                contiguous = self._contiguous
                if self._is_syncing or contiguous - self._durable < self._tail // 2:
                    return
                self._is_syncing = True
            self._run(self._sync)
            with self._changed:
                self._is_syncing, self._durable = False, contiguous
                self._changed.notify_all()

    def _sync(self, session: Session) -> None:
        """Bring the file to the server's disk."""
        with session.opened(self._path, Flag.WRITE) as handle:
            session.do(*session.fsync_requests(handle))

    def _run(self, step: Callable[[Session], T]) -> T:
        """Return what ``step`` returns for a session; it must not make the file anew.

        A new file would have holes. After an error no thread waits any longer. Raise Transient if
        the file is gone, StoreError.
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
    """Return a temporary name, with ``word`` in it, in the directory of ``name``."""
    directory, slash, _ = name.rpartition("/")
    return f"{directory}{slash}.ckptsync-{word}.part"


def _published_by_another(name: str) -> Transient:
    """Return the error for a temporary file that is gone."""
    return Transient(
        f"{name}: another writer of the same file has published or removed what was written",
        hint="check that no two workers send the same files",
    )
