"""The files of a directory on an SFTP server, by their names below it.  No link is followed, neither at a name's end nor on the way.

That is asked of the server first and done afterwards, since SFTP knows no other way: it keeps out links that stand there, not somebody
who puts one there in between, who could write to the store anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ckptsync.errors import ConfigError, NotFound, StoreError
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.sftp.failures import refused, told_of
from ckptsync.stores.sftp.pool import Sessions
from ckptsync.stores.sftp.session import Reply, Request, Session
from ckptsync.stores.sftp.wire import Attributes, Code, Flag, Kind, Refused, opening, text

FSYNC = "fsync@openssh.com"
_KEPT = 10_000
_SMALL = 256 << 10  # bytes that are taken out of an answer, rather than read to where they belong
TRUSTED_S = 30.0  # for so long a name that was seen to be a regular file is one, and the directories that it is in are no links


class ServerFiles:
    """Names below ``place.path``, which must exist: a file system that is not mounted is not an empty store."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.place = sessions, sessions.place
        self._root = self.place.path.rstrip("/")
        self._seen: dict[str, float] = {}
        self._witness = 0
        self._syncs_directories: bool | None = None

    def path(self, name: str = "") -> bytes:
        """As the server knows it."""
        return (f"{self._root}/{name}" if name else self._root or "/").encode("utf-8", "surrogateescape")

    def told(self, name: str) -> str:
        """As errors tell it."""
        return self.path(name).decode("utf-8", "backslashreplace")

    def found(self, name: str) -> Attributes | None:
        """What the server says of a regular file; nothing of links, and of what lies behind them."""
        return self._looked(name, _parents(name))

    def _looked(self, name: str, way: Sequence[str]) -> Attributes | None:
        *parents, last = self.sessions.on(lambda s: self.lstat(s, [*way, name]))
        if last is None or not last.is_file or not all(p and p.is_directory for p in parents):
            return None
        if len(self._seen) > _KEPT:
            self._seen.clear()
        self._seen.update(dict.fromkeys([*(f"{path}/" for path in way), name], time.monotonic()))
        return last

    def lstat(self, session: Session, names: Sequence[str]) -> list[Attributes | None]:
        """What each name is, in one round trip; None where there is nothing."""
        replies = session.ask(*(Request(Kind.LSTAT, text(self.path(name))) for name in names))
        return [self._found(name, reply) for name, reply in zip(names, replies, strict=True)]

    def read_into(self, name: str, start: int, out: memoryview) -> int:
        """Fill ``out``; fewer bytes than it holds are returned only where the file ends.  Raises NotFound."""
        if self._is_strange(name) and self._looked(name, [p for p in _parents(name) if self._is_strange(f"{p}/")]) is None:
            raise self.absent(name)
        try:
            return self.sessions.on(lambda s: self._read(s, name, start, out.cast("B") if out.nbytes else out), out.nbytes)
        except Refused as e:
            self._seen.pop(name, None)
            if e.code == Code.NO_SUCH_FILE:
                raise self.absent(name) from e
            raise refused(self.place, self.told(name), e) from e

    def absent(self, name: str) -> NotFound:
        """What to raise where a name is not there; raises StoreError where the root is not there."""
        self.look()
        return NotFound(f"{name}: not in {self.place.url}")

    def look(self) -> None:
        """Raises StoreError if there is no root, or if the store that was there is not: a disk that is not mounted is not an empty store."""
        root, witness = self.sessions.on(lambda s: (self._root_itself(s), self.lstat(s, [STORE_FILE])[0]))
        if root is None or not root.is_directory:
            raise StoreError(
                f"{self.place.url}: no such directory, a store's directory wanted",
                hint=f"is the path right, is the file system mounted on {self.place.host}?  A store is made by the first worker or push",
            )
        time_ = witness.mtime if witness and witness.is_file else 0
        if self._witness and time_ != self._witness:
            raise StoreError(
                f"{self.place.url}: not the store that was opened",
                hint=f"is the file system mounted on {self.place.host}?  Then start again",
            )
        self._witness = time_

    def has_root(self) -> bool:
        """Whether the store's directory is there."""
        root = self.sessions.on(self._root_itself)
        return root is not None and root.is_directory

    def missing_parent(self) -> str:
        """The directory above the store's, if that is not there; else empty."""
        parent = self._root.rpartition("/")[0] or "/"
        name = parent.encode("utf-8", "surrogateescape")
        found = self.sessions.on(lambda s: self._found("", s.ask(Request(Kind.STAT, text(name)))[0]))
        return "" if found and found.is_directory else f"{parent} on {self.place.host}"

    def make_root(self) -> None:
        """Make the directory, and those above it that are missing.  Raises ConfigError."""
        parts = self._root.split("/")[1:]
        try:
            for n in range(len(parts)):
                self._make_above(f"/{'/'.join(parts[: n + 1])}".encode())
        except Refused as e:
            why = refused(self.place, self.told(""), e)
            raise ConfigError(f"{self.place.url}: no store can be made here: {why}", hint=why.hint) from e
        if not self.has_root():
            raise ConfigError(f"{self.place.url}: no store can be made here: not a directory", hint="is the path right?")

    def make_directory(self, name: str) -> None:
        """Make it, or find it there, durably; raises StoreError where something else is, Refused where one above is missing."""
        self.sessions.on(lambda s: _make_directory(s, self.path(name)))
        if not (is_there := self.sessions.on(lambda s: self.lstat(s, [name]))[0]) or not is_there.is_directory:
            raise StoreError(
                f"{self.place.host}:{self.told(name)}: no directory", hint="a file or a link stands where a directory should be"
            )
        self.sync_directory(name.rpartition("/")[0])

    def sync_directory(self, name: str) -> None:
        """Names in it are durable, where the server can do that: it opens a directory as a file, and brings it to its disk, as OpenSSH does."""
        if self.syncs_directories():
            with told_of(self.place, self.told(name)):
                self._sync(self.path(name))

    def syncs_directories(self) -> bool:
        """Whether the server can do that; asked once."""
        if self._syncs_directories is None:
            self._syncs_directories = self._can_sync_directories()
        return self._syncs_directories

    def is_directory(self, prefix: str) -> bool:
        """Whether it is one ("" or ending in "/"), and reached through no link."""
        way = [prefix[:at] for at, c in enumerate(prefix) if c == "/"]
        return all(found and found.is_directory for found in self.sessions.on(lambda s: self.lstat(s, way)))

    def remove(self, name: str) -> None:
        """A file; not being there is no error."""

        def step(session: Session) -> None:
            try:
                session.answer(Kind.REMOVE, text(self.path(name)))
            except Refused as e:
                if e.code != Code.NO_SUCH_FILE:
                    raise refused(self.place, self.told(name), e) from e

        self._seen.pop(name, None)
        self.sessions.on(step)

    def remove_empty(self, name: str) -> bool:
        """Whether a directory was removed: one that is not empty stays, and one that is not ours."""

        def step(session: Session) -> bool:
            try:
                session.answer(Kind.RMDIR, text(self.path(name)))
            except Refused:
                return False  # what does no harm may stay
            return True

        self._seen.pop(f"{name}/", None)
        return self.sessions.on(step)

    def forget(self, name: str) -> None:
        """Something was done to it."""
        self._seen.pop(name, None)

    def _is_strange(self, key: str) -> bool:
        """Whether a file (or, with a slash, a directory) has to be looked at before it is read."""
        return time.monotonic() - self._seen.get(key, -TRUSTED_S) >= TRUSTED_S

    def _root_itself(self, session: Session) -> Attributes | None:
        """The operator named it: it may be a link, other than anything below it."""
        return self._found("", session.ask(Request(Kind.STAT, text(self.path())))[0])

    def _make_above(self, path: bytes) -> None:
        """Make a directory that is missing, and its name durable, as far as what is above it is ours to sync."""
        if self.sessions.on(lambda s: is_there(s, path)):
            return
        self.sessions.on(lambda s: _make_directory(s, path))
        with contextlib.suppress(Refused):
            self._sync(path.rpartition(b"/")[0] or b"/")

    def _found(self, name: str, reply: Reply) -> Attributes | None:
        try:
            return reply.fields(Kind.ATTRS).attributes()
        except Refused as e:
            if e.code != Code.NO_SUCH_FILE:
                raise refused(self.place, self.told(name), e) from e
            return None

    def _read(self, session: Session, name: str, start: int, out: memoryview) -> int:
        count = 0
        if 0 < len(out) <= min(session.read_size, _SMALL):
            count = self._read_once(session, name, start, out)
            if count in (0, len(out)):
                return count
        handle = self._opened(session, name)
        try:
            return count + session.read_into(handle, start + count, out[count:])
        finally:
            close(session, handle)

    def _read_once(self, session: Session, name: str, start: int, out: memoryview) -> int:
        try:
            return session.read_closing(self._opened(session, name), start, out)
        except Refused as e:
            if e.code != Code.EOF:
                raise
            return 0

    def _opened(self, session: Session, name: str) -> bytes:
        return session.answer(Kind.OPEN, opening(self.path(name), Flag.READ), Kind.HANDLE).handle()

    def _can_sync_directories(self) -> bool:
        """Tried on the root: where it is refused there, the server, or its file system, knows nothing of the kind."""
        try:
            self._sync(self.path())
        except Refused:
            return False
        return True

    def _sync(self, path: bytes) -> None:
        def step(session: Session) -> None:
            if FSYNC not in session.extensions:
                raise Refused(Code.OP_UNSUPPORTED)
            handle = session.answer(Kind.OPEN, opening(path, Flag.READ), Kind.HANDLE).handle()
            try:
                session.extended(FSYNC, text(handle), slow=True)
            finally:
                close(session, handle)

        if self._syncs_directories is not False:
            self.sessions.on(step)


def close(session: Session, handle: bytes) -> None:
    """Let go of a file, where the connection still is one."""
    if session.is_usable:
        session.ask(Request(Kind.CLOSE, text(handle)))


def _parents(name: str) -> list[str]:
    """The directories it is in."""
    return [name[:at] for at, c in enumerate(name) if c == "/"]


def is_there(session: Session, path: bytes) -> bool:
    """Whether the path names anything."""
    try:
        session.answer(Kind.LSTAT, text(path), Kind.ATTRS)
    except Refused as e:
        if e.code != Code.NO_SUCH_FILE:
            raise
        return False
    return True


def _make_directory(session: Session, path: bytes) -> None:
    """Another writer may have made it: what is there is looked at afterwards."""
    try:
        session.answer(Kind.MKDIR, text(path) + bytes(4))
    except Refused:
        if not is_there(session, path):
            raise
