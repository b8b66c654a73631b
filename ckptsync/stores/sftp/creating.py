"""Small files that must not be there yet, several at once: one round trip for each step of all of them.

All that can go wrong for one of them stops only that one where it is.  Its thread goes on with it alone, as with a large file (`sftp.upload`,
`sftp.commit`), and meets whatever it is again, there with its reason.  Requests on one handle are done in their order (filexfer-02, 6.1).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ckptsync.errors import CkptsyncError, Exists
from ckptsync.stores.contract import About
from ckptsync.stores.parts import Upload
from ckptsync.stores.sftp.bundle import Bundles
from ckptsync.stores.sftp.commit import claim, claim_again
from ckptsync.stores.sftp.files import FSYNC, ServerFiles
from ckptsync.stores.sftp.session import Reply, Request, Session
from ckptsync.stores.sftp.space import why
from ckptsync.stores.sftp.upload import NEW, SftpTarget, SftpUpload, unfinished
from ckptsync.stores.sftp.ways import Ways
from ckptsync.stores.sftp.wire import Code, Flag, Kind, Refused, opening, text

MOST = 16  # files of a bundle


class Stage(IntEnum):
    """How far a file is."""

    NOTHING = 0  # is of it on the server
    BEGUN = 1  # its temporary file may be there
    ASKED = 2  # all of it is durable there, and may have its name
    NAMED = 3  # but its name may not be durable
    DONE = 4


@dataclass(slots=True, eq=False)
class Small:
    """A file on its way: ``part`` is its temporary name."""

    name: str
    part: str
    data: memoryview
    stage: Stage = Stage.NOTHING

    @property
    def directory(self) -> str:
        """Where it will be."""
        return self.name.rpartition("/")[0]


class Creating:
    """The ways in which one store's threads create small files."""

    def __init__(self, files: ServerFiles, ways: Ways, threads: int) -> None:
        self._files, self._ways = files, ways
        self._bundles: Bundles[Small] = Bundles(functools.partial(create, files), MOST, max(1, threads))

    def create(self, name: str, data: memoryview) -> None:
        """As a store's `create` does, of so few bytes that they are in memory."""
        small = Small(name, unfinished(name, secrets.token_hex(8)), data)
        try:
            self._ways.make(small.directory)
        except Refused as e:
            raise why(self._files, small.directory, e, 0) from e
        self._bundles.join(small)
        self._files.forget(name)
        if small.stage in (Stage.NOTHING, Stage.BEGUN):
            self._create_alone(small)
        elif small.stage == Stage.ASKED:
            self._claim_alone(small)
        elif small.stage == Stage.NAMED:
            self._files.sync_directory(small.directory)

    def refuse_taken(self, name: str) -> None:
        """Raises Exists if it is there; it is still there after a power cut then."""
        if self._files.found(name):
            self._ways.settle(name.rpartition("/")[0])  # its writer may be dead: else a power cut could take what we say is there
            raise Exists(f"{name}: already there")

    def _create_alone(self, small: Small) -> None:
        target = self._target(small)
        if small.stage == Stage.BEGUN:
            SftpUpload(target, small.part).give_up()
        self.refuse_taken(small.name)
        target.put_whole(small.data)

    def _claim_alone(self, small: Small) -> None:
        try:
            claim_again(self._files, small.name, small.part, len(small.data))
        except Exception:
            SftpUpload(self._target(small), small.part).give_up()
            raise

    def _target(self, small: Small) -> SftpTarget:
        publish = functools.partial(claim, self._files, small.name)
        return SftpTarget(self._files, self._ways, small.name, About(len(small.data)), publish)


@dataclass(frozen=True, slots=True)
class ToCreate:
    """A `Target`: a small file that must not be there yet."""

    creating: Creating
    name: str

    def put_whole(self, data: memoryview) -> None:
        """As `parts.Target` says."""
        self.creating.create(self.name, data)

    def begin(self) -> Upload:
        """Never called: what is small is one part."""
        raise AssertionError(self.name)


def create(files: ServerFiles, smalls: Sequence[Small]) -> None:
    """Bring each as far as nothing is in its way.  Raises nothing of the store's: whose file is not done finds out why."""
    try:
        named = Stage.NAMED if files.syncs_directories() else Stage.DONE
        files.sessions.once(lambda session: _create(session, files, smalls, named))
    except (CkptsyncError, Refused):
        return


def _create(session: Session, files: ServerFiles, smalls: Sequence[Small], named: Stage) -> None:
    first: dict[str, Small] = {}
    for small in smalls:
        first.setdefault(small.name, small)  # others of that name find it taken
    looks = session.ask(*(_look(files, small) for small in first.values()))
    free = [small for small, reply in zip(first.values(), looks, strict=True) if _is_free(reply)]
    written = _written(session, files, _opened(session, files, free))
    directories = sorted({small.directory for small in written}) if named < Stage.DONE else []
    handles = _named(session, files, written, directories, named)
    _settled(session, [small for small in written if small.stage == Stage.NAMED], handles)


def _opened(session: Session, files: ServerFiles, smalls: Sequence[Small]) -> list[tuple[Small, bytes]]:
    for small in smalls:
        small.stage = Stage.BEGUN
    replies = session.ask(*(Request(Kind.OPEN, opening(files.path(small.part), NEW)) for small in smalls))
    handles = (_handle(reply) for reply in replies)
    return [(small, handle) for small, handle in zip(smalls, handles, strict=True) if handle is not None]


def _written(session: Session, files: ServerFiles, opened: Sequence[tuple[Small, bytes]]) -> list[Small]:
    """Those that are whole, closed and durable, and whose names were still free after that."""
    steps = [_content(session, small, handle) for small, handle in opened]
    replies = iter(session.ask(*(r for its in steps for r in its), *(_look(files, small) for small, _ in opened)))
    whole = [sum(_is_done(next(replies)) for _ in its) == len(its) for its in steps]
    free = [_is_free(reply) for reply in replies]  # a server may replace what it should refuse to
    return [small for (small, _), is_whole, is_free in zip(opened, whole, free, strict=True) if is_whole and is_free]


def _content(session: Session, small: Small, handle: bytes) -> list[Request]:
    closing = Request(Kind.CLOSE, text(handle))
    if FSYNC not in session.extensions:
        return [*session.writing(handle, 0, small.data), closing]
    return [*session.writing(handle, 0, small.data), _durably(handle), closing]


def _named(
    session: Session, files: ServerFiles, smalls: Sequence[Small], directories: Sequence[str], named: Stage
) -> dict[str, bytes]:
    """Give them their names; handles of the directories."""
    for small in smalls:
        small.stage = Stage.ASKED
    renames = [Request(Kind.RENAME, text(files.path(small.part)) + text(files.path(small.name))) for small in smalls]
    replies = session.ask(*renames, *(Request(Kind.OPEN, opening(files.path(path), Flag.READ)) for path in directories))
    for small, reply in zip(smalls, replies, strict=False):
        if _is_done(reply):
            small.stage = named
    handles = (_handle(reply) for reply in replies[len(smalls) :])
    return {path: handle for path, handle in zip(directories, handles, strict=True) if handle is not None}


def _settled(session: Session, smalls: Sequence[Small], handles: Mapping[str, bytes]) -> None:
    """What has a name has it after a power cut, too."""
    syncing = [_durably(handle) for handle in handles.values()]
    replies = session.ask(*syncing, *(Request(Kind.CLOSE, text(handle)) for handle in handles.values()))
    durable = {path for path, reply in zip(handles, replies, strict=False) if _is_done(reply)}
    for small in smalls:
        if small.directory in durable:
            small.stage = Stage.DONE


def _durably(handle: bytes) -> Request:
    return Request(Kind.EXTENDED, text(FSYNC.encode()) + text(handle), slow=True)


def _look(files: ServerFiles, small: Small) -> Request:
    return Request(Kind.LSTAT, text(files.path(small.name)))


def _is_free(reply: Reply) -> bool:
    return reply.code == Code.NO_SUCH_FILE


def _is_done(reply: Reply) -> bool:
    return reply.code == Code.OK


def _handle(reply: Reply) -> bytes | None:
    """None where it was refused."""
    try:
        return reply.fields(Kind.HANDLE).handle()
    except Refused:
        return None  # its owner asks again, and is told why
