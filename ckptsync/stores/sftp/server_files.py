"""Files and directories below a store's directory on an SFTP server, and the sessions.

Threads share a few sessions, each for one step at a time, and a step that fails is repeated with a
new session. So every step here is written to be safe when it runs twice.

No link is followed, neither at a name's end nor on the way. SFTP cannot open a file without
following links, so each component is looked up first: that excludes links that are there already,
not a user who makes one in between, who could write to the store anyway.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.safe_names import STORE_FILE
from ckptsync.safe_open import NFS_REMAINS, Odd, is_plain_path
from ckptsync.stores.limits import Limits
from ckptsync.stores.retry import Persistence
from ckptsync.stores.sftp.connection import Address, last_lines
from ckptsync.stores.sftp.protocol import (
    FSYNC,
    Attributes,
    Code,
    Flag,
    Malformed,
    PacketType,
    Reply,
    Request,
    Session,
    StatusError,
    text,
)

T = TypeVar("T")
CHECKED_S = 30.0  # s for which a name that was a regular file is read without a new check
_MOST_CHECKED = 10_000
MOST_FILES = 1_000_000  # files of a directory, at most: a server may invent them
MOST_BYTES = 128 << 20  # bytes of the answers about a directory, at most
_MOST_IDLE = 500  # pairs of answers without a new name, in a row, at most
_TRIES = 8  # tries to make a directory that others delete meanwhile
_LOST = (Code.NO_CONNECTION, Code.CONNECTION_LOST)  # a gateway's codes for disks that it has lost
Listing = dict[str, Attributes | Odd | None]
"""By name: a file's attributes, the kind of an entry that is ignored, or None for a directory.

A directory's name ends in a slash, so that names sort as whole paths do.
"""


class Sessions:
    """Sessions that threads share, opened when needed and used again.

    There are at most ``limits.threads`` for uploads, and one more. Nothing else of this kind of
    store tries again after a failure.
    """

    def __init__(self, address: Address, limits: Limits) -> None:
        self.address, self._limits = address, limits
        self._persistence = Persistence(limits.patience)
        self._turns = threading.Semaphore(max(1, limits.threads) + 1)
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def on(self, step: Callable[[Session], T]) -> T:
        """Call ``step`` with a session; return what it returns.

        It is called again, with another session, while it raises Transient, so it must be safe to
        call twice. Raise StatusError as it does, but Transient if the server has lost its disks; a
        Malformed answer closes the session and becomes a StoreError.
        """
        return self._persistence.call(lambda: self._run_once(step))

    def _run_once(self, step: Callable[[Session], T]) -> T:
        """Call ``step`` with an idle session or a new one; raise as `on`."""
        with self._turns:
            session = None
            try:
                session = self._idle_session() or Session(self.address, self._limits)
                return step(session)
            except StatusError as e:
                if e.code in _LOST:
                    raise Transient(f"{self.address.host}: the server's connection is lost") from e
                raise
            except Malformed as e:
                if session:
                    session.close()
                raise StoreError(
                    f"{self.address.url}: the answer is no SFTP: {e}",
                    hint=f"does a start-up file of the login shell on {self.address.host} print"
                    " text (see ~/.bashrc), or does sshd set a ForceCommand?",
                ) from e
            finally:
                if session:
                    self._return_session(session)

    def _idle_session(self) -> Session | None:
        """Take an idle session that is usable, and close others; None if there is none."""
        with self._lock:
            while self._idle:
                session = self._idle.pop()
                if session.is_usable:
                    return session
                session.close()
        return None

    def _return_session(self, session: Session) -> None:
        """Make a session idle, or close it if it is not usable."""
        with self._lock:
            if session.is_usable:
                self._idle.append(session)
                return
        session.close()


def _close_all(sessions: list[Session]) -> None:
    """Close all sessions, and empty the list."""
    while sessions:
        sessions.pop().close()


class ServerFiles:
    """Files below ``address.path``, which must exist before they are used.

    A file system that is not mounted is not an empty store.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.address = sessions, sessions.address
        self._root = self.address.path.encode("utf-8", "surrogateescape")
        self._checked_at: dict[str, float] = {}  # when names were last seen to be regular files
        self._made: set[str] = set()  # directories that exist, with durable names
        self._store_file_mtime = 0
        self._syncs_directories: bool | None = None

    def path(self, name: str = "") -> bytes:
        """Return a name's path on the server; without a name the store's."""
        return self._root + (b"/" + name.encode("utf-8", "surrogateescape") if name else b"")

    def shown(self, name: str) -> str:
        """Return the host, and the path of a name, for messages."""
        return f"{self.address.host}:{self.path(name).decode('utf-8', 'backslashreplace')}"

    def on(self, name: str, step: Callable[[Session], T]) -> T:
        """Call ``step`` with a session, as `Sessions.on`; return its result.

        Raise a refusal as StoreError about ``name``: NotFound if something is missing.
        """
        try:
            return self.sessions.on(step)
        except StatusError as e:
            raise self.refusal(name, e) from e

    # Reading

    def find(self, name: str) -> Attributes | None:
        """Return the attributes of a regular file that is reached over no link, else None.

        Such a name is not looked up again by `read_into` for `CHECKED_S` seconds. Raise StoreError.
        """
        paths = [self.path(each) for each in (*_parents(name), name)]
        *parents, attributes = self.on(name, lambda s: s.stat_paths(paths))
        if attributes is None or not attributes.is_file or not _are_directories(parents):
            return None
        if len(self._checked_at) >= _MOST_CHECKED:
            self._checked_at.clear()
        self._checked_at[name] = time.monotonic()
        return attributes

    def is_directory(self, prefix: str) -> bool:
        """Return whether a prefix ("" or ending in "/") is a directory, reached over no link.

        Always True for "". Raise StoreError.
        """
        paths = [self.path(each) for each in _parents(prefix)]
        return _are_directories(self.on(prefix, lambda s: s.stat_paths(paths)))

    def list_directory(self, prefix: str) -> Listing:
        """Return what is in a directory ("" or ending in "/"); empty if there is none."""
        directory = prefix[:-1]
        try:
            return self.on(directory, lambda session: self.listing(session, directory))
        except NotFound:  # deleted since it was listed
            return {}

    def listing(self, session: Session, directory: str) -> Listing:
        """Return what is in a directory ("" is the root).

        Raise StatusError if it does not exist, StoreError if the server's listing does not end or
        is too large.
        """
        shown, listing = self.shown(directory), Listing()
        size = idle = 0
        is_over = False
        with session.opened(self.path(directory)) as handle:
            while not is_over:
                before = len(listing)
                # two requests at once: the second answer ends most listings
                for reply in session.exchange(*[Request(PacketType.READDIR, text(handle))] * 2):
                    size += len(reply.body)
                    is_over = not _add_names(reply, listing) or is_over
                idle = 0 if len(listing) > before else idle + 1
                if size > MOST_BYTES or len(listing) > MOST_FILES or idle > _MOST_IDLE:
                    raise StoreError(
                        f"{shown}: its listing does not end, or has more than {MOST_FILES} files or"
                        f" {MOST_BYTES >> 20} MiB of names"
                    )
        return listing

    def read_into(self, name: str, start: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``start``; return the number of bytes read.

        They are fewer than ``out`` holds only if the file ends before. A name that was found to
        be a regular file within `CHECKED_S` is not looked up again. Raise NotFound, StoreError.
        """
        is_checked = time.monotonic() - self._checked_at.get(name, -CHECKED_S) < CHECKED_S
        if not is_checked and self.find(name) is None:
            raise self.not_found(name)
        view = out.cast("B") if out.nbytes else out

        def read(session: Session) -> int:
            """Read into ``view`` from ``start``; return how many bytes came."""
            with session.opened(self.path(name), Flag.READ) as handle:
                return session.read_into(handle, start, view)

        try:
            return self.on(name, read)
        except StoreError as e:
            self.forget(name)
            raise (self.not_found(name) if isinstance(e, NotFound) else e) from e

    def forget(self, name: str) -> None:
        """Have the next read look the name up again."""
        self._checked_at.pop(name, None)

    def not_found(self, name: str) -> NotFound:
        """Return the error for a missing name; raise as `check_root` if the store is missing."""
        self.check_root()
        return NotFound(f"{name}: not in {self.address.url}")

    def check_root(self) -> None:
        """Raise StoreError if the store's directory is missing, or is another one than before.

        The first call records the time of the store's own file (`STORE_FILE`); later calls compare
        it. A disk that is not mounted is not an empty store.
        """
        mount_hint = f"mount the file system on {self.address.host}"
        if not self.has_root():
            raise StoreError(
                f"{self.address.url}: no such directory",
                hint=f"check the path, and {mount_hint}; the first worker or push makes a store",
            )
        store_file = self.find(STORE_FILE)
        mtime = store_file.mtime if store_file else 0
        if self._store_file_mtime and mtime != self._store_file_mtime:
            raise StoreError(
                f"{self.address.url}: not the store that was opened",
                hint=f"{mount_hint}, then start again",
            )
        self._store_file_mtime = mtime

    def has_root(self) -> bool:
        """Return whether the store's directory exists."""
        return self._is_directory(self.path())

    def missing_parent(self) -> str:
        """Return the directory above the store's, with the host, if it is missing; else ""."""
        parent = self._root.rpartition(b"/")[0] or b"/"
        has_parent = self._is_directory(parent)
        return "" if has_parent else f"{os.fsdecode(parent)} on {self.address.host}"

    def _is_directory(self, path: bytes) -> bool:
        """Return whether a path is a directory, or a link to one: the operator named it."""
        return _are_directories(self.on("", lambda s: s.stat_paths([path], PacketType.STAT)))

    # Changing

    def make_root(self) -> None:
        """Make the store's directory, and those above it that are missing, durably.

        Some servers refuse to sync a directory above; names in it are then not durable. Raise
        ConfigError if it cannot be made, Transient.
        """
        parts = self._root.split(b"/")
        paths = [b"/".join(parts[: n + 1]) or b"/" for n in range(len(parts))]

        def step(session: Session) -> None:
            """Make each directory of the path, and sync the one above it."""
            for above, path in pairwise(paths):
                session.make_directory(path)
                with contextlib.suppress(StatusError), session.opened(above, Flag.READ) as handle:
                    session.do(*session.fsync_requests(handle))

        try:
            self.on("", step)
            reason, hint = "" if self.has_root() else "not a directory", "check the path"
        except Transient:
            raise
        except StoreError as e:
            reason, hint = str(e), e.hint
        if reason:
            raise ConfigError(f"{self.address.url}: no store can be made here: {reason}", hint=hint)

    def in_directory(self, directory: str, step: Callable[[Session], T], name: str = "") -> T:
        """Call ``step`` in a directory that is made, durably, if it is missing; return its result.

        Directories above are made, too, except the store's own (""). The step is called again if
        the directory was deleted meanwhile. Raise StoreError, as `on`.
        """
        for _ in range(_TRIES):
            with contextlib.suppress(NotFound):
                self._make_directories(directory)
                return self.on(name, step)
            self._made.clear()
        raise StoreError(
            f"{self.shown(directory)}: others deleted it {_TRIES} times while it was made"
        )

    def _make_directories(self, directory: str) -> None:
        """Make a directory and those above it, with durable names, unless this process has done so.

        Raise NotFound if one above vanishes meanwhile, StoreError if a file or a link has the name.
        """
        if directory in self._made:
            return
        if not directory:
            self.check_root()  # each time: a disk that is no longer mounted gets no new run
            return
        parent = directory.rpartition("/")[0]
        self._make_directories(parent)

        attributes = self.on(directory, lambda s: s.make_directory(self.path(directory)))
        if not attributes.is_directory:
            raise StoreError(
                f"{self.shown(directory)}: not a directory",
                hint="a file or a link stands where a directory should be",
            )
        # another writer may have made it, and be killed before its name is durable
        self.sync_directory(parent)
        self._made.add(directory)

    def sync_directory(self, directory: str) -> None:
        """Make the names in a directory durable, if the server can."""
        self.on(directory, lambda s: self.sync(s, directory))

    def sync(self, session: Session, directory: str, *changes: Request) -> None:
        """Send requests that change names in a directory, and make the names durable if possible.

        OpenSSH's server opens a directory like a file, and syncs it. Whether a server can is tested
        once, on the store's own directory.
        """
        if self._syncs_directories is None:
            can_sync = FSYNC in session.extensions
            try:
                with session.opened(self.path(), Flag.READ) as handle:
                    session.do(*session.fsync_requests(handle))
            except StatusError as e:
                if e.code in _LOST:
                    raise
                can_sync = False
            self._syncs_directories = can_sync
        if not self._syncs_directories:
            session.do(*changes)
            return
        with session.opened(self.path(directory), Flag.READ, changes) as handle:
            session.do(*session.fsync_requests(handle))

    def remove(self, name: str) -> None:
        """Remove a file, not durably; do nothing if it is not there. Raise StoreError."""
        self.forget(name)
        with contextlib.suppress(NotFound):
            self.on(name, lambda s: s.do(Request(PacketType.REMOVE, text(self.path(name)))))

    def remove_empty(self, directory: str) -> bool:
        """Remove a directory; return False if the server refuses: missing, not empty, not ours.

        Later writes look again which directories exist. Raise StoreError.
        """
        self._made.clear()
        try:
            self.sessions.on(lambda s: s.do(Request(PacketType.RMDIR, text(self.path(directory)))))
        except StatusError:
            return False
        return True

    def refusal(self, name: str, e: StatusError) -> StoreError:
        """Return NotFound for a file that is missing, else a StoreError in the server's words.

        Version 3 of the protocol has one code, FAILURE, for a full disk and for everything else.
        """
        host = self.address.host
        if e.code == Code.NO_SUCH_FILE:
            return NotFound(f"{self.shown(name)}: no such file or directory")
        if e.code == Code.PERMISSION_DENIED:
            user = self.address.user or "this user"
            return StoreError(
                f"{self.shown(name)}: permission denied",
                hint=f"{user} needs to read, write and search the store's directories on {host}",
            )
        return StoreError(
            f"{self.shown(name)}: the server refused: {last_lines(e.text) or f'code {e.code}'}",
            hint=f"look at {host}: is its disk full or read-only (df), a quota used up; its log",
        )


def _add_names(reply: Reply, listing: Listing) -> bool:
    """Add the entries in an answer to READDIR to ``listing``; return whether there may be more.

    A directory gets the key ``name/`` and None, a file its attributes, and anything else the reason
    why it is left out: "name", "link" or "special file". ``.``, ``..`` and NFS's remains are
    skipped. Raise StatusError for a refusal, Malformed for a damaged answer.
    """
    try:
        fields = reply.fields(PacketType.NAME)
    except StatusError as e:
        if e.code != Code.EOF:
            raise
        return False
    count = fields.u32()
    for _ in range(count):
        name = fields.text().decode("utf-8", "surrogateescape")
        fields.text()  # the line that `ls -l` would print
        info = fields.attributes()
        if name in ("", ".", "..") or NFS_REMAINS.fullmatch(name):
            continue
        if "/" in name or not is_plain_path(name):
            listing[name[:255]] = "name"
        elif info.is_directory:
            listing[name + "/"] = None
        else:
            listing[name] = info if info.is_file else "link" if info.is_link else "special file"
    return count > 0


def _are_directories(all_attributes: Sequence[Attributes | None]) -> bool:
    """Return whether each of the attributes is a directory's."""
    return all(each and each.is_directory for each in all_attributes)


def _parents(name: str) -> list[str]:
    """Return the directories that a name is in, the topmost first; of a prefix, itself included."""
    return [name[:index] for index, character in enumerate(name) if character == "/"]
