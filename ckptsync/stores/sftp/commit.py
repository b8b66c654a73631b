"""The step that gives a file on an SFTP server its name, and what it means when the answer to it is lost.

``rename`` of version 3 refuses an existing target (filexfer-02, 6.5); OpenSSH does it by a hard link, so it holds against other writers too.
``posix-rename@openssh.com`` replaces, atomically.  Where a server has no such thing, nothing can be replaced: to remove first, and rename then, would
leave nothing where a writer is killed in between.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.sftp.failures import refused
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.upload import taken_over
from ckptsync.stores.sftp.wire import Kind, Refused, text

RENAME_OVER = "posix-rename@openssh.com"


class _TakenOver(Exception):
    pass


def claim(files: ServerFiles, name: str, part: str, size: int) -> None:
    """Give ``part`` its name, unless the name is taken; raises Exists."""
    _claim(files, name, part, size, was_asked=False)


def claim_again(files: ServerFiles, name: str, part: str, size: int) -> None:
    """The same where it was asked for before, and refused, or the answer was lost."""
    _claim(files, name, part, size, was_asked=True)


def _claim(files: ServerFiles, name: str, part: str, size: int, *, was_asked: bool) -> None:
    def rename(session: Session) -> None:
        if files.lstat(session, [name])[0] is not None:  # a server may replace what it should refuse to
            raise Exists(f"{name}: already there")
        _rename(session, files.path(part), files.path(name))

    try:
        _done(files, name, part, size, rename, asked=was_asked)
    except Exists:
        files.sync_directory(name.rpartition("/")[0])  # so that what is said to be there is still there after a power cut
        raise
    files.sync_directory(name.rpartition("/")[0])


def replace(files: ServerFiles, name: str, part: str, size: int) -> None:
    """Give ``part`` its name, whatever has it now."""

    def rename(session: Session) -> None:
        if RENAME_OVER in session.extensions:
            session.extended(RENAME_OVER, text(files.path(part)) + text(files.path(name)))
        elif files.lstat(session, [name])[0] is None:
            _rename(session, files.path(part), files.path(name))
        else:
            raise StoreError(
                f"{files.place.host}:{files.told(name)}: cannot be replaced, since the server has no {RENAME_OVER}",
                hint="OpenSSH's sftp-server has it",
            )

    _done(files, name, part, size, rename)
    files.sync_directory(name.rpartition("/")[0])


def _rename(session: Session, old: bytes, new: bytes) -> None:
    session.answer(Kind.RENAME, text(old) + text(new))


def _done(files: ServerFiles, name: str, part: str, size: int, rename: Callable[[Session], None], *, asked: bool = False) -> None:
    def step(session: Session) -> None:
        nonlocal asked
        was_asked, asked = asked, True
        if was_asked and _is_done(files, session, name, part, size):
            return
        try:
            rename(session)
        except Refused as e:
            raise _reason(files, session, name, part, e) from e

    try:
        files.sessions.on(step)
    except _TakenOver as e:
        raise taken_over(name) from e
    finally:
        files.forget(name)


def _is_done(files: ServerFiles, session: Session, name: str, part: str, size: int) -> bool:
    """Whether the rename that was asked for on a connection that broke was done: nobody else knows the temporary name."""
    left, there = files.lstat(session, [part, name])
    return left is None and there is not None and there.is_file and there.size == size


def _reason(files: ServerFiles, session: Session, name: str, part: str, e: Refused) -> StoreError | _TakenOver:
    left, there = files.lstat(session, [part, name])
    if left is None:
        return _TakenOver()
    if there is not None:
        return Exists(f"{name}: already there")
    return refused(files.place, files.told(name), e)
