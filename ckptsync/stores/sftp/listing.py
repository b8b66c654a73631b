"""What is below a directory on an SFTP server, in order of whole names, several directories at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ckptsync.errors import Corrupt, StoreError
from ckptsync.paths import checked_path
from ckptsync.stores.beneath import Odd, Passed, nobody
from ckptsync.stores.contract import Entry
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.sftp.failures import refused
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.session import Reply, Request, Session
from ckptsync.stores.sftp.wire import Attributes, Code, Fields, Kind, Refused, text

AT_ONCE = 32  # directories that are listed together: on a distant server waiting is what listing costs
MOST = 1_000_000  # files of one directory
DEEPEST = 200  # a server could make them up for ever
_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")  # a deleted file that some NFS client still has open

_Found = tuple[str, Attributes | Odd | None]  # directories with a slash and None: the slash makes them sort as whole paths do
Listing = list[_Found]


def walk(files: ServerFiles, prefix: str, skips: Callable[[str], bool] = is_unfinished, passed: Passed = nobody) -> Iterator[Entry]:
    """Every regular file below ``prefix`` ("" or ending in "/"), without unfinished writes.

    ``passed`` is told of links, and of all else that is no checkpoint's file, as `beneath.walk` tells of it.
    """
    if files.is_directory(prefix):
        yield from _walk(files, prefix, listings(files, [prefix])[0], skips, passed)


def directories(files: ServerFiles, prefix: str) -> list[str]:
    """The names of those directly below ``prefix``, sorted."""
    if not files.is_directory(prefix):
        return []
    return sorted(key[:-1] for key, found in listings(files, [prefix])[0] if found is None and not is_unfinished(key[:-1]))


def listings(files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    """What is in each of these directories; nothing where there is none."""
    return files.sessions.on(lambda session: _Directories(session, files, prefixes).read())


def _walk(files: ServerFiles, prefix: str, listing: Listing, skips: Callable[[str], bool], passed: Passed) -> Iterator[Entry]:
    listing.sort(key=lambda found: found[0])
    below = [key for key, found in listing if found is None]
    known: dict[str, Listing] = {}
    for key, found in listing:
        if found is not None:
            if isinstance(found, str):
                passed(prefix + key, found)
            elif not skips(key):
                yield Entry(prefix + key, found.size, float(found.mtime))
            continue
        if prefix.count("/") >= DEEPEST:
            raise StoreError(f"{files.place.host}:{files.told(prefix)}: directories {DEEPEST} deep")
        if key not in known:
            several = below[:AT_ONCE]
            known = dict(zip(several, listings(files, [prefix + k for k in several]), strict=True))
        below.remove(key)
        yield from _walk(files, prefix + key, known.pop(key), skips, passed)


class _Directories:
    """Several that are read at once, with one request for each under way, since servers may not like two."""

    def __init__(self, session: Session, files: ServerFiles, prefixes: Sequence[str]) -> None:
        self._session, self._files, self._prefixes = session, files, prefixes
        self._found: list[Listing] = [[] for _ in prefixes]
        self._seen = [0] * len(prefixes)

    def read(self) -> list[Listing]:
        """What is in each of them."""
        replies = self._session.ask(*(Request(Kind.OPENDIR, text(self._files.path(prefix[:-1]))) for prefix in self._prefixes))
        opened = {n: handle for n, reply in enumerate(replies) if (handle := self._opened(n, reply)) is not None}
        reading = dict(opened)
        while reading:
            replies = self._session.ask(*(Request(Kind.READDIR, text(handle)) for handle in reading.values()))
            reading = {n: opened[n] for n, reply in zip(reading, replies, strict=True) if self._is_more(n, reply)}
        self._session.ask(*(Request(Kind.CLOSE, text(handle)) for handle in opened.values()))
        return self._found

    def _opened(self, n: int, reply: Reply) -> bytes | None:
        """A handle, unless the directory was deleted since it was listed."""
        try:
            return self._session.parsed(lambda: reply.fields(Kind.HANDLE).text())
        except Refused as e:
            if e.code != Code.NO_SUCH_FILE:
                raise self._refused(n, e) from e
            return None

    def _is_more(self, n: int, reply: Reply) -> bool:
        """Whether there may be more in it."""
        try:
            more = self._session.parsed(lambda: list(_entries(reply.fields(Kind.NAME))))
        except Refused as e:
            if e.code != Code.EOF:
                raise self._refused(n, e) from e
            return False
        self._found[n] += filter(None, more)
        self._seen[n] += len(more)
        if self._seen[n] > MOST:
            raise StoreError(
                f"{self._files.place.host}:{self._files.told(self._prefixes[n])}: more than {MOST} files in one directory"
            )
        return bool(more)

    def _refused(self, n: int, e: Refused) -> StoreError:
        return refused(self._files.place, self._files.told(self._prefixes[n][:-1]), e)


def _entries(fields: Fields) -> Iterator[_Found | None]:
    """What an answer to READDIR names, None for what is nothing of the directory's; what a server calls them is anything."""
    for _ in range(fields.u32()):
        name = fields.text().decode("utf-8", "surrogateescape")
        fields.text()  # as `ls -l` would print it
        found = fields.attributes()
        yield None if name in ("", ".", "..") or _REMAINS.fullmatch(name) else _entry(name, found)


def _entry(name: str, found: Attributes) -> _Found:
    if not _is_plain(name):
        return name, "name"
    if found.is_directory:
        return name + "/", None
    return name, found if found.is_file else "link" if found.is_link else "special file"


def _is_plain(name: str) -> bool:
    try:
        return "/" not in name and bool(checked_path(name))
    except Corrupt:
        return False  # left out, as in every store
