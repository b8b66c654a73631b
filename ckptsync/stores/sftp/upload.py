"""Writing a file on an SFTP server: under a temporary name in the directory where it will be, then one step that gives it its name.

The temporary name is ``.ckptsync-<token>-<ours>.part``.  The token is made of name and origin, so a writer that was killed is found again; what is
found is first renamed to have ``ours`` in its name, which nobody else ever uses.  So a path with ``ours`` in it means one file for ever: the one that
this upload has made or taken over, and all that is written through it is in the file that it commits.

Two writers of one token (a daemon and a push on one node) write the same bytes, for this is what an origin promises.  The second one takes the file away
from the first, which notices at its next part or at its commit, and gives up (Transient: nothing is wrong with trying again).  What it still had in flight
lands in a file of the same bytes, also if that was committed meanwhile.

What a taken file has is read back and compared, part by part.  That costs what sending costs, so a writer that is restarted often would never get on:
from time to time the server brings the file to its disk, and then an empty file ``.ckptsync-<token>-<ours>.<bytes>.part`` says how many of its first bytes
are there for good.  Of those the beginning of each part is compared.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptsync.errors import StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.parts import Part
from ckptsync.stores.sftp.files import FSYNC, ServerFiles, close
from ckptsync.stores.sftp.listing import listings
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.space import why
from ckptsync.stores.sftp.ways import Ways
from ckptsync.stores.sftp.wire import Attributes, Code, Flag, Kind, Refused, cut_to, opening, text

_T = TypeVar("_T")
NEW = Flag.WRITE | Flag.CREATE | Flag.TRUNCATE
_STEP = 1 << 20  # bytes that are read back at once, to be compared
_FIRST = 64 << 10  # of a part: where it was never written, so much tells
STEP_S = 10.0  # seconds, at least, between two records of what is durable: under a bandwidth limit, too

Publish = Callable[[str, int], None]  # from a temporary name and the size to the file's name; see `sftp.commit`


@dataclass(frozen=True, slots=True)
class SftpTarget:
    """A name of the store that is about to be written."""

    files: ServerFiles
    ways: Ways
    name: str
    about: About
    publish: Publish

    def put_whole(self, data: memoryview) -> None:
        """As `parts.Target` says: no part of it is worth finding again."""
        part = unfinished(self.name, secrets.token_hex(8))

        def step(session: Session) -> None:
            handle = session.answer(Kind.OPEN, opening(self.files.path(part), NEW), Kind.HANDLE).handle()
            try:
                session.write(handle, 0, data)
                sync(session, handle)
            finally:
                close(session, handle)

        try:
            self._beside(step, len(data))
            self.publish(part, len(data))
        except Exception:
            SftpUpload(self, part).give_up()
            raise

    def begin(self) -> SftpUpload:
        """As `parts.Target` says."""
        part = unfinished(self.name, f"{token(self.name, self.about)}-{secrets.token_hex(8)}")
        left = left_behind(self.files, self.name, self.about)
        records = [record for each in left for record in each.records]
        for n, old in enumerate(left):
            if self._is_taken_over(old, part):
                return SftpUpload(self, part, old, [*records, *(other.part for other in left[n + 1 :])])
        self._beside(lambda s: self._make(s, part), 0)
        return SftpUpload(self, part, others=records)

    def _is_taken_over(self, old: Left, part: str) -> bool:
        """Whether what an earlier writer has left is ours now.  Its record goes before it: a writer killed in between loses nothing."""
        record = recorded(part, old.durable)
        if old.durable:
            self._beside(lambda s: self._make(s, record), 0)
        if self._is_taken(old.part, part):
            return True
        if old.durable:
            self.files.remove(record)
        return False

    def _make(self, session: Session, part: str) -> None:
        close(session, session.answer(Kind.OPEN, opening(self.files.path(part), NEW), Kind.HANDLE).handle())

    def _beside(self, step: Callable[[Session], None], needed: int) -> None:
        """Take a step that makes a file in the name's directory, which is made if it is not there."""
        try:
            self.ways.within(self.name.rpartition("/")[0], step)
        except Refused as e:
            raise why(self.files, self.name, e, needed) from e

    def _is_taken(self, old: str, new: str) -> bool:
        asked = False

        def step(session: Session) -> bool:
            nonlocal asked
            was_asked, asked = asked, True
            try:
                session.answer(Kind.RENAME, text(self.files.path(old)) + text(self.files.path(new)))
            except Refused:  # somebody else was faster; or it was us, and only the answer was lost
                return was_asked and self.files.lstat(session, [new])[0] is not None
            return True

        return self.files.sessions.on(step)


@dataclass(frozen=True, slots=True)
class Left:
    """An unfinished file that an earlier writer has left: its first ``durable`` bytes are there for good, as its ``records`` say."""

    part: str
    size: int
    durable: int = 0
    records: tuple[str, ...] = ()


class SftpUpload:
    """An unfinished file, and what was ``left`` of it.  ``others``: further files that are left, of no use once this one is whole."""

    def __init__(self, target: SftpTarget, part: str, left: Left | None = None, others: Sequence[str] = ()) -> None:
        self.target, self.part, self.left = target, part, left or Left(part, 0)
        self._others, self._lock = others, threading.Lock()
        self._done: dict[int, int] = {}  # from where to where the file has what it should, beyond `_whole`
        self._whole, self._since = 0, time.monotonic()
        self._due = self._recorded = self.left.durable

    def is_there(self, part: Part) -> bool:
        """As `parts.Upload` says: read back, since a server can digest nothing for us."""
        end = part.start + len(part.data)
        if end > self.left.size:
            return False
        data = part.data[:_FIRST] if end <= self.left.durable else part.data
        if not self._on(lambda session: self._is_same(session, part.start, data), 0, len(data)):
            return False
        self._have(part)
        return True

    def put(self, part: Part) -> None:
        """As `parts.Upload` says."""

        def step(session: Session) -> None:
            handle = self._opened(session, Flag.WRITE)
            try:
                session.write(handle, part.start, part.data)
            finally:
                close(session, handle)

        self._on(step, len(part.data), len(part.data))
        self._have(part)

    def _have(self, part: Part) -> None:
        """Record what is durable, from time to time."""
        with self._lock:
            self._done[part.start] = part.start + len(part.data)
            while (end := self._done.pop(self._whole, 0)) > self._whole:
                self._whole = end
            whole = self._whole
            if whole <= self._due or time.monotonic() - self._since < STEP_S:
                return
            self._due, self._since = whole, time.monotonic()
        self._record(whole)

    def _record(self, whole: int) -> None:
        """The name is all that it says, and it is made after the bytes are durable."""

        def step(session: Session) -> bool:
            if FSYNC not in session.extensions:
                return False
            handle = self._opened(session, Flag.WRITE)
            try:
                sync(session, handle)
            finally:
                close(session, handle)
            path = self.target.files.path(recorded(self.part, whole))
            close(session, session.answer(Kind.OPEN, opening(path, NEW), Kind.HANDLE).handle())
            return True

        if self._on(step, 0):
            with self._lock:  # two threads may be at it
                less, self._recorded = sorted([whole, self._recorded])
            self._remove_record(less)

    def _remove_record(self, count: int) -> None:
        if count:
            self.target.files.remove(recorded(self.part, count))

    def commit(self, size: int) -> None:
        """As `parts.Upload` says."""

        def step(session: Session) -> None:
            handle = self._opened(session, Flag.WRITE)
            try:
                self._end_at(session, handle, size)
                sync(session, handle)
            finally:
                close(session, handle)

        self._on(step, 0)
        self.target.publish(self.part, size)
        self._remove_record(self._recorded)
        for other in self._others:
            self.target.files.remove(other)

    def abandon(self) -> None:
        """As `parts.Upload` says."""
        self._remove_record(self._recorded)
        self.target.files.remove(self.part)

    def give_up(self) -> None:
        """Abandon it, if that can be done: the error that made us is the one to tell."""
        try:
            self.abandon()
        except StoreError:
            return  # never listed

    def _opened(self, session: Session, flag: Flag) -> bytes:
        """Never makes it: what is gone has been taken over, and must not come back with holes."""
        return session.answer(Kind.OPEN, opening(self.target.files.path(self.part), flag), Kind.HANDLE).handle()

    def _is_same(self, session: Session, start: int, data: memoryview) -> bool:
        handle = self._opened(session, Flag.READ)
        try:
            at, step = 0, _FIRST
            while at < len(data):
                wanted = data[at : at + step]
                found = bytearray(len(wanted))
                if session.read_into(handle, start + at, memoryview(found)) < len(wanted) or found != wanted:
                    return False
                at, step = at + step, _STEP
        finally:
            close(session, handle)
        return True

    def _end_at(self, session: Session, handle: bytes, size: int) -> None:
        seen = self.target.files.lstat(session, [self.part])[0]  # not of the handle: servers with caches know the size by name
        found = seen.size if seen else 0
        if found < size:
            raise StoreError(f"{self.target.files.told(self.part)}: has {found} bytes where {size} were written")
        if found > size:
            session.answer(Kind.FSETSTAT, cut_to(handle, size))

    def _on(self, step: Callable[[Session], _T], needed: int, moves: int = 0) -> _T:
        files = self.target.files
        try:
            return files.sessions.on(step, moves)
        except Refused as e:
            if e.code == Code.NO_SUCH_FILE:
                raise taken_over(self.target.name) from e
            raise why(files, self.target.name, e, needed) from e


def unfinished(name: str, words: str) -> str:
    """A temporary name beside ``name``."""
    way, slash, _ = name.rpartition("/")
    return f"{way}{slash}.ckptsync-{words}.part"


def recorded(part: str, count: int) -> str:
    """The name that says of a temporary file that its first ``count`` bytes are durable."""
    return f"{part.removesuffix('.part')}.{count}.part"


def token(name: str, about: About) -> str:
    """The same for the same name and origin, on every machine; nobody's without an origin."""
    if not about.origin:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{name}\0{about.origin}".encode(), digest_size=8).hexdigest()


def left_behind(files: ServerFiles, name: str, about: About) -> list[Left]:
    """Unfinished files that earlier writers of the same name and origin have left; the largest first."""
    if not about.origin:
        return []
    way, slash, _ = name.rpartition("/")
    pattern = re.compile(rf"\.ckptsync-{token(name, about)}-([^.]*)(?:\.([0-9]{{1,19}}))?\.part")
    sizes: dict[str, int] = {}
    records: dict[str, list[int]] = {}
    for key, seen in listings(files, [way + slash])[0].items():
        if isinstance(seen, Attributes) and (found := pattern.fullmatch(key)):
            if found[2]:
                records.setdefault(f"{key[: found.end(1)]}.part", []).append(int(found[2]))
            else:
                sizes[key] = seen.size
    left = []
    for key in sizes.keys() | records.keys():
        said = records.get(key, [])
        part = f"{way}{slash}{key}"
        left.append(Left(part, sizes.get(key, 0), max([0, *said]), tuple(recorded(part, count) for count in said)))
    return sorted(left, key=lambda each: -each.size)


def sync(session: Session, handle: bytes) -> None:
    """What was written is on the server's disk, where the server can say so."""
    if FSYNC in session.extensions:
        session.extended(FSYNC, text(handle), slow=True)


def taken_over(name: str) -> Transient:
    """Another writer of the same bytes has what was written, and goes on with it."""
    return Transient(
        f"{name}: another writer of the same file has taken over what was written", hint="do two workers send the same files?"
    )
