"""Write a file on an SFTP server under a temporary name, then rename it.

The temporary name is in the same directory; the rename publishes the file.

The temporary name of a large file is ``.ckptsync-<token>-<owner>.part``.  The token is made of name
and origin, so the next writer finds what a killed one has left.  It renames that file to an owner
of its own, a random word that nobody else uses.  So a temporary name means one file for ever, and
whatever an upload writes lies in the file that it publishes.

Two writers of one token (a service and a push on one node) write the same bytes, as the same origin
promises.  The second one takes the file from the first, whose next part or commit fails
(Transient).  What the first one still had in flight lands in a file of the same bytes, also if that
is published meanwhile.

An upload that goes on with a file reads its parts back and compares them, which costs what sending
costs.  So that a writer which is restarted often gets on, the server brings the file to its disk
from time to time, and an empty file ``.ckptsync-<token>-<owner>.<bytes>.part`` records how many of
its first bytes are durable.  Of those the beginning of each part is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.part_upload import FilePart
from ckptsync.stores.sftp.protocol import (
    FSYNC,
    RENAME_OVER,
    Attributes,
    Flag,
    Session,
    StatusError,
)
from ckptsync.stores.sftp.server_files import ServerFiles

T = TypeVar("T")
RECORD_S = 10.0  # s between two records of what is durable, at least
_NEW = Flag.WRITE | Flag.CREATE | Flag.TRUNCATE
_STEP = 1 << 20  # bytes that are read back and compared at once
_FIRST = 64 << 10  # of a part: enough to see whether it was ever written


@dataclass(slots=True)
class Leftover:
    """An unfinished file of an earlier writer.

    Its first ``durable`` bytes are on the server's disk, as the names of its ``records`` say.
    """

    part: str
    size: int = 0
    durable: int = 0
    records: list[str] = field(default_factory=list)


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
        """Write all of a small file: open, write, rename.

        The requests of one step share a round trip.
        """
        part = temporary_name(self.name, secrets.token_hex(8))

        def step(session: Session) -> None:
            with session.opened(self.files.path(part), _NEW) as handle:
                writes = session.write_requests(handle, 0, data)
                session.do(*writes, *session.fsync_requests(handle))

        try:
            self.files.in_directory(self.directory, step, self.name, max(1, len(data)))
            self.publish(part, len(data))
        except Exception:
            # the first error is the one to raise, and what is left is never listed
            with contextlib.suppress(StoreError):
                self.files.remove(part)
            raise

    def begin(self) -> SftpUpload:
        """Take over what an earlier writer has left, or make a new temporary file."""
        part = temporary_name(self.name, f"{token(self.name, self.about)}-{secrets.token_hex(8)}")
        leftovers = find_leftovers(self.files, self.name, self.about)
        records = [record for each in leftovers for record in each.records]
        for n, leftover in enumerate(leftovers):
            if self._take_over(leftover, part):
                others = [other.part for other in leftovers[n + 1 :]]
                return SftpUpload(self, part, leftover, [*records, *others])
        self._make_empty(part)
        return SftpUpload(self, part, Leftover(part), records)

    def publish(self, part: str, size: int) -> None:
        """Rename a durable temporary file to its name, durably.

        Raises Exists; Transient where another writer has taken the file.

        ``rename`` of version 3 refuses a name that is taken (filexfer-02, 6.5).  OpenSSH does it by
        a hard link, so that holds against other writers, too; another server may replace, therefore
        the name is looked at before.  ``posix-rename@openssh.com`` replaces in one step; a server
        without that extension can replace nothing: to remove first would leave nothing where a
        writer is killed in between.
        """
        was_tried, taken = False, Exists(f"{self.name}: already there")
        old, new = self.files.path(part), self.files.path(self.name)

        def is_published(session: Session) -> bool:
            nonlocal was_tried
            left, found = session.stat_paths([old, new])
            is_ours = found is not None and found.is_file and found.size == size
            if was_tried and left is None and is_ours:
                return True  # only the answer was lost: nobody else knows the temporary name
            if found is not None and not self.replaces:
                raise taken
            in_one_step = self.replaces and RENAME_OVER in session.extensions
            if found is not None and not in_one_step:
                raise StoreError(
                    f"{self.files.shown(self.name)}: cannot be replaced, since the server has no"
                    f" {RENAME_OVER}",
                    hint="OpenSSH's sftp-server has it",
                )
            was_tried = True
            try:
                session.rename(old, new, replaces=in_one_step)
            except StatusError as e:
                left, found = session.stat_paths([old, new])
                if left is None:
                    return False
                if found is not None:
                    raise taken from e
                raise
            return True

        try:
            if not self.files.on(self.name, is_published):
                raise _taken_over(self.name)
        except Exists:
            # the name that is said to be there survives a power cut
            self.files.sync_directory(self.directory)
            raise
        finally:
            self.files.forget(self.name)
        self.files.sync_directory(self.directory)

    def _take_over(self, leftover: Leftover, part: str) -> bool:
        """Return whether an earlier writer's file is ours now.

        Its record is made first: a writer killed in between loses nothing.
        """
        record = record_name(part, leftover.durable)
        if leftover.durable:
            self._make_empty(record)
        was_tried = False

        def step(session: Session) -> bool:
            nonlocal was_tried
            again, was_tried = was_tried, True
            try:
                session.rename(self.files.path(leftover.part), self.files.path(part))
            except StatusError:
                # another writer was faster; or it was us, and only the answer was lost
                return again and self.files.lstat(session, [part]) != [None]
            return True

        if self.files.on(self.name, step):
            return True
        if leftover.durable:
            self.files.remove(record)
        return False

    def _make_empty(self, name: str) -> None:
        def step(session: Session) -> None:
            with session.opened(self.files.path(name), _NEW):
                pass

        self.files.in_directory(self.directory, step, self.name, 1)


class SftpUpload:
    """A `PartUpload`: a temporary file, and what an earlier writer had ``left`` of it.

    ``useless``: other temporary files, to be removed in the end.
    """

    def __init__(
        self, target: SftpTarget, part: str, left: Leftover, useless: Sequence[str]
    ) -> None:
        self.target, self.part, self.left = target, part, left
        self._files, self._path = target.files, target.files.path(part)
        self._useless, self._lock = useless, threading.Lock()
        # parts beyond `_whole` that are in the file: from where to where
        self._done: dict[int, int] = {}
        self._whole = 0
        # bytes that our record says are durable, and when the next record is due
        self._recorded, self._due = left.durable, time.monotonic() + RECORD_S

    def is_there(self, part: FilePart) -> bool:
        """Return whether the file has these bytes already.

        It reads them back, since a server cannot compute a digest for us.
        """
        end = part.start + len(part.data)
        if end > self.left.size:
            return False
        data = part.data[:_FIRST] if end <= self.left.durable else part.data

        def is_same(session: Session) -> bool:
            at, step = 0, _FIRST
            with session.opened(self._path, Flag.READ) as handle:
                while at < len(data):
                    wanted = data[at : at + step]
                    found = bytearray(len(wanted))
                    count = session.read_into(handle, part.start + at, memoryview(found))
                    if count < len(wanted) or found != wanted:
                        return False
                    at, step = at + step, _STEP
            return True

        if not self._on(is_same):
            return False
        self._have(part)
        return True

    def put(self, part: FilePart) -> None:
        """Write a part."""

        def step(session: Session) -> None:
            with session.opened(self._path, Flag.WRITE) as handle:
                session.write(handle, part.start, part.data)

        self._on(step, len(part.data))
        self._have(part)

    def commit(self, size: int) -> None:
        """Make the file durable, ``size`` bytes long, and publish it."""

        def step(session: Session) -> None:
            with session.opened(self._path, Flag.WRITE) as handle:
                # not of the handle: servers with caches know the size by name
                (seen,) = session.stat_paths([self._path])
                found = seen.size if seen else 0
                if found < size:
                    raise StoreError(
                        f"{self._files.shown(self.part)}: has {found} bytes where {size} were"
                        " written"
                    )
                if found > size:
                    session.truncate(handle, size)
                session.do(*session.fsync_requests(handle))

        self._on(step)
        self.target.publish(self.part, size)
        self._remove_record(self._recorded)
        for other in self._useless:
            self._files.remove(other)

    def abandon(self) -> None:
        """Remove the file: nobody will go on with it."""
        self._remove_record(self._recorded)
        self._files.remove(self.part)

    def _on(self, step: Callable[[Session], T], needed: int = 0) -> T:
        """Return what ``step`` returns.

        It never makes the file: a missing one was taken over, and must not come back with holes.
        """
        try:
            return self._files.on(self.target.name, step, needed)
        except NotFound as e:
            raise _taken_over(self.target.name) from e

    def _have(self, part: FilePart) -> None:
        """Note that a part is in the file; from time to time record how much is durable."""
        now = time.monotonic()
        with self._lock:
            self._done[part.start] = part.start + len(part.data)
            while (end := self._done.pop(self._whole, 0)) > self._whole:
                self._whole = end
            whole = self._whole
            if whole <= self._recorded or now < self._due:
                return
            self._due = math.inf  # one thread at a time
        if self._record(whole):
            before, self._recorded = self._recorded, whole
            self._remove_record(before)
            self._due = now + RECORD_S

    def _record(self, whole: int) -> bool:
        """Bring the file to the server's disk, then make the record, if the server can."""

        def step(session: Session) -> bool:
            if FSYNC not in session.extensions:
                return False
            with session.opened(self._path, Flag.WRITE) as handle:
                session.do(*session.fsync_requests(handle))
            with session.opened(self._files.path(record_name(self.part, whole)), _NEW):
                return True

        return self._on(step)

    def _remove_record(self, count: int) -> None:
        if count:
            self._files.remove(record_name(self.part, count))


def temporary_name(name: str, words: str) -> str:
    """Return a temporary name in the directory of ``name``."""
    directory, slash, _ = name.rpartition("/")
    return f"{directory}{slash}.ckptsync-{words}.part"


def record_name(part: str, count: int) -> str:
    """Return the name that says of a temporary file that its first ``count`` bytes are durable."""
    return f"{part.removesuffix('.part')}.{count}.part"


def token(name: str, about: About) -> str:
    """Return the same word for the same name and origin, on every machine.

    A random one without an origin.
    """
    if not about.origin:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{name}\0{about.origin}".encode(), digest_size=8).hexdigest()


def find_leftovers(files: ServerFiles, name: str, about: About) -> list[Leftover]:
    """Return the unfinished files of earlier writers of the same name and origin, largest first."""
    if not about.origin:
        return []
    directory, slash, _ = name.rpartition("/")
    pattern = re.compile(rf"(\.ckptsync-{token(name, about)}-[^.]*)(?:\.([0-9]{{1,19}}))?\.part")
    leftovers: dict[str, Leftover] = {}
    for key, found in files.list_directories([directory + slash])[0].items():
        if isinstance(found, Attributes) and (match := pattern.fullmatch(key)):
            part = f"{directory}{slash}{match[1]}.part"
            leftover = leftovers.setdefault(part, Leftover(part))
            if match[2]:
                leftover.records.append(f"{directory}{slash}{key}")
                leftover.durable = max(leftover.durable, int(match[2]))
            else:
                leftover.size = found.size
    return sorted(leftovers.values(), key=lambda each: -each.size)


def _taken_over(name: str) -> Transient:
    return Transient(
        f"{name}: another writer of the same file has taken over what was written",
        hint="check that no two workers send the same files",
    )
