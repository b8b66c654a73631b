"""Why an SFTP server refused to write: version 3 of the protocol has one word, FAILURE, for a full disk and for everything else."""

from __future__ import annotations

import errno

from ckptsync.errors import StoreError
from ckptsync.stores.oserrors import HINTS
from ckptsync.stores.sftp.failures import refused
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.wire import Code, Kind, Refused, text

STATVFS = "statvfs@openssh.com"
_READ_ONLY = 0x1
_LITTLE = 1 << 20  # bytes: fewer, and a disk counts as full


def why(files: ServerFiles, name: str, e: Refused, needed: int) -> StoreError:
    """The StoreError that says why writing ``needed`` bytes was refused, by what the server says of its disk (OpenSSH's PROTOCOL, 3.4)."""
    error = refused(files.place, files.told(name), e)
    if e.code != Code.FAILURE:
        return error
    try:
        code = files.sessions.once(lambda session: _state(session, files.path(), max(needed, _LITTLE)))
    except (Refused, StoreError):
        return error  # it does not say
    if not code:
        return error
    said = {errno.ENOSPC: "no space left on device", errno.EROFS: "read-only file system"}[code]
    return StoreError(f"{files.place.host}:{files.told(name)}: {said}", hint=HINTS[code])


def _state(session: Session, path: bytes, needed: int) -> int:
    if STATVFS not in session.extensions:
        return 0
    fields = session.extended(STATVFS, text(path), Kind.EXTENDED_REPLY)
    _, each, _, _, available, inodes, _, free_inodes, _, flags = (fields.u64() for _ in range(10))
    if flags & _READ_ONLY:
        return errno.EROFS
    is_full = available * each < needed or (inodes > 0 and free_inodes == 0)
    return errno.ENOSPC if is_full else 0
