"""What is below a directory on an SFTP server, in order of whole names, several directories at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptsync.errors import Corrupt, StoreError
from ckptsync.paths import checked_path
from ckptsync.stores.contract import Entry
from ckptsync.stores.posix_draft import is_unfinished
from ckptsync.stores.sftp_failures import refused
from ckptsync.stores.sftp_files import ServerFiles
from ckptsync.stores.sftp_session import Reply, Request, Session
from ckptsync.stores.sftp_wire import Attributes, Code, Fields, Kind, Refused, text

AT_ONCE = 32  # directories that are listed together: on a distant server waiting is what listing costs
MOST = 1_000_000  # files of one directory
_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")  # a deleted file that some NFS client still has open

Listing = list[tuple[str, Attributes | None]]  # directories with a slash and None: the slash makes them sort as whole paths do


def walk(files: ServerFiles, prefix: str) -> Iterator[Entry]:
    """Every regular file below ``prefix`` ("" or ending in "/").  Unfinished writes, links and names that no checkpoint's file has are left out."""
    if files.is_directory(prefix):
        yield from _walk(files, prefix, listings(files, [prefix])[0])


def listings(files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    """What is in each of these directories; nothing where there is none."""
    return files.sessions.on(lambda session: _listings(session, files, prefixes))


def _walk(files: ServerFiles, prefix: str, listing: Listing) -> Iterator[Entry]:
    listing.sort(key=lambda found: found[0])
    below = [key for key, found in listing if found is None]
    known: dict[str, Listing] = {}
    for key, found in listing:
        if found is not None:
            if not is_unfinished(key):
                yield Entry(prefix + key, found.size, float(found.mtime))
            continue
        if key not in known:
            several = below[:AT_ONCE]
            known = dict(zip(several, listings(files, [prefix + k for k in several]), strict=True))
        below.remove(key)
        yield from _walk(files, prefix + key, known.pop(key))


def _listings(session: Session, files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    found: list[Listing] = [[] for _ in prefixes]
    handles: dict[int, bytes] = {}
    for n, reply in enumerate(session.ask(*(Request(Kind.OPENDIR, text(files.path(prefix[:-1]))) for prefix in prefixes))):
        if (handle := _opened(session, files, prefixes[n], reply)) is not None:
            handles[n] = handle
    reading = dict(handles)
    while reading:
        for n in list(_read_on(session, files, reading, prefixes, found)):
            del reading[n]
    session.ask(*(Request(Kind.CLOSE, text(handle)) for handle in handles.values()))
    return found


def _read_on(
    session: Session, files: ServerFiles, reading: dict[int, bytes], prefixes: Sequence[str], found: list[Listing]
) -> Iterator[int]:
    """Read some more of each directory, one request for each, since servers may not like two; those that are at their end."""
    replies = session.ask(*(Request(Kind.READDIR, text(handle)) for handle in reading.values()))
    for n, reply in zip(list(reading), replies, strict=True):
        more = _more(session, files, prefixes[n], reply)
        if more is None:
            yield n
        elif len(found[n]) > MOST:
            raise StoreError(f"{files.place.host}:{files.told(prefixes[n])}: more than {MOST} files in one directory")
        else:
            found[n] += more


def _opened(session: Session, files: ServerFiles, prefix: str, reply: Reply) -> bytes | None:
    """The handle of a directory, unless it was deleted since it was listed."""
    try:
        return session.parsed(lambda: reply.fields(Kind.HANDLE).text())
    except Refused as e:
        if e.code != Code.NO_SUCH_FILE:
            raise refused(files.place, files.told(prefix[:-1]), e) from e
        return None


def _more(session: Session, files: ServerFiles, prefix: str, reply: Reply) -> Listing | None:
    """Some entries, or none at the end."""
    try:
        return session.parsed(lambda: list(_entries(reply.fields(Kind.NAME))))
    except Refused as e:
        if e.code != Code.EOF:
            raise refused(files.place, files.told(prefix[:-1]), e) from e
        return None


def _entries(fields: Fields) -> Iterator[tuple[str, Attributes | None]]:
    """Directories and regular files of an answer to READDIR; what a server calls them is anything."""
    for _ in range(fields.u32()):
        name = _plain(fields.text())
        fields.text()  # as `ls -l` would print it
        found = fields.attributes()
        if name and found.is_directory:
            yield name + "/", None
        elif name and found.is_file and not _REMAINS.fullmatch(name):
            yield name, found


def _plain(name: bytes) -> str:
    """The name, or "" for one that no checkpoint's file has; ``.`` and ``..`` are such."""
    try:
        return "" if b"/" in name else checked_path(name.decode())
    except (Corrupt, UnicodeDecodeError):
        return ""  # left out, as in every store
