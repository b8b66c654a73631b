"""Writing a file on an SFTP server: under a temporary name in the directory where it will be, then one step that gives it its name.

The temporary name is ``.ckptsync-<token>-<ours>.part``.  The token is made of name and origin, so a writer that was killed is found again; what is
found is first renamed to have ``ours`` in its name, which nobody else ever uses.  So a path with ``ours`` in it means one file for ever: the one that
this upload has made or taken over, and all that is written through it is in the file that it commits.

Two writers of one token (a daemon and a push on one node) write the same bytes, for this is what an origin promises.  The second one takes the file away
from the first, which notices at its next part or at its commit, and gives up (Transient: nothing is wrong with trying again).  What it still had in flight
lands in a file of the same bytes, also if that was committed meanwhile.  Nothing of a taken file is believed: each part is read back and compared.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
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
            handle = session.answer(Kind.OPEN, opening(self.files.path(part), NEW), Kind.HANDLE).text()
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
        for n, (old, size) in enumerate(left):
            if self._is_taken(old, part):
                return SftpUpload(self, part, size, tuple(other for other, _ in left[n + 1 :]))
        self._beside(lambda s: self._make(s, part), 0)
        return SftpUpload(self, part)

    def _make(self, session: Session, part: str) -> None:
        close(session, session.answer(Kind.OPEN, opening(self.files.path(part), NEW), Kind.HANDLE).text())

    def _beside(self, step: Callable[[Session], None], needed: int) -> None:
        """Take a step that makes a file in the name's directory, which is made if it is not there."""
        try:
            self.ways.within(self.name.rpartition("/")[0], step)
        except Refused as e:
            raise why(self.files, self.name, e, needed) from e

    def _is_taken(self, old: str, new: str) -> bool:
        """Whether what an earlier writer has left is ours now."""
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
class SftpUpload:
    """An unfinished file.  ``left``: bytes that an earlier writer has left; ``others``: further files that are left, of no use."""

    target: SftpTarget
    part: str
    left: int = 0
    others: tuple[str, ...] = ()

    def is_there(self, part: Part) -> bool:
        """As `parts.Upload` says: read back, since a server can digest nothing for us."""
        if part.start + len(part.data) > self.left:
            return False
        return self._on(lambda session: self._is_same(session, part), 0, len(part.data))

    def put(self, part: Part) -> None:
        """As `parts.Upload` says."""

        def step(session: Session) -> None:
            handle = self._opened(session, Flag.WRITE)
            try:
                session.write(handle, part.start, part.data)
            finally:
                close(session, handle)

        self._on(step, len(part.data), len(part.data))

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
        for other in self.others:
            self.target.files.remove(other)

    def abandon(self) -> None:
        """As `parts.Upload` says."""
        self.target.files.remove(self.part)

    def give_up(self) -> None:
        """Abandon it, if that can be done: the error that made us is the one to tell."""
        try:
            self.abandon()
        except StoreError:
            return  # never listed

    def _opened(self, session: Session, flag: Flag) -> bytes:
        """Never makes it: what is gone has been taken over, and must not come back with holes."""
        return session.answer(Kind.OPEN, opening(self.target.files.path(self.part), flag), Kind.HANDLE).text()

    def _is_same(self, session: Session, part: Part) -> bool:
        handle = self._opened(session, Flag.READ)
        try:
            at, step = 0, _FIRST
            while at < len(part.data):
                wanted = part.data[at : at + step]
                found = bytearray(len(wanted))
                if session.read_into(handle, part.start + at, memoryview(found)) < len(wanted) or found != wanted:
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


def token(name: str, about: About) -> str:
    """The same for the same name and origin, on every machine; nobody's without an origin."""
    if not about.origin:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{name}\0{about.origin}".encode(), digest_size=8).hexdigest()


def left_behind(files: ServerFiles, name: str, about: About) -> list[tuple[str, int]]:
    """Unfinished files that earlier writers of the same name and origin have left, and their sizes; the largest first."""
    if not about.origin:
        return []
    way, slash, _ = name.rpartition("/")
    begins = f".ckptsync-{token(name, about)}-"
    found = [
        (f"{way}{slash}{key}", seen.size)
        for key, seen in listings(files, [way + slash])[0]
        if isinstance(seen, Attributes) and key.startswith(begins) and key.endswith(".part")
    ]
    return sorted(found, key=lambda at: -at[1])


def sync(session: Session, handle: bytes) -> None:
    """What was written is on the server's disk, where the server can say so."""
    if FSYNC in session.extensions:
        session.extended(FSYNC, text(handle), slow=True)


def taken_over(name: str) -> Transient:
    """Another writer of the same bytes has what was written, and goes on with it."""
    return Transient(
        f"{name}: another writer of the same file has taken over what was written", hint="do two workers send the same files?"
    )
