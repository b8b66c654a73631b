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
MOST = 1_000_000  # files of directories that are listed together
BYTES = 128 << 20  # of what a server says of them
IDLE = 1000  # answers that bring nothing new, one after the other
NAMES = 10_000_000  # files and directories of a store
DEEPEST = 200  # directories in directories; a server could make them up for ever, as all of these
_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")  # a deleted file that some NFS client still has open

Listing = dict[str, Attributes | Odd | None]  # directories with a slash and None: the slash makes them sort as whole paths do


def walk(files: ServerFiles, prefix: str, skips: Callable[[str], bool] = is_unfinished, passed: Passed = nobody) -> Iterator[Entry]:
    """Every regular file below ``prefix`` ("" or ending in "/"), without unfinished writes.

    ``passed`` is told of links, and of all else that is no checkpoint's file, as `beneath.walk` tells of it.
    """
    if files.is_directory(prefix):
        yield from _Walk(files, skips, passed).below(prefix, listings(files, [prefix])[0])


def directories(files: ServerFiles, prefix: str) -> list[str]:
    """The names of those directly below ``prefix``, sorted."""
    if not files.is_directory(prefix):
        return []
    return sorted(key[:-1] for key, found in listings(files, [prefix])[0].items() if found is None and not is_unfinished(key[:-1]))


def listings(files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    """What is in each of these directories; nothing where there is none."""
    return files.sessions.on(lambda session: _Directories(session, files, prefixes).read())


class _Walk:
    """Through all directories, sorted by whole names."""

    def __init__(self, files: ServerFiles, skips: Callable[[str], bool], passed: Passed) -> None:
        self._files, self._skips, self._passed = files, skips, passed
        self._count = 0

    def below(self, prefix: str, listing: Listing) -> Iterator[Entry]:
        """The files of a directory, and of those in it."""
        self._count += len(listing) + 1
        if self._count > NAMES or prefix.count("/") > DEEPEST:
            many = f"more than {NAMES} files" if self._count > NAMES else f"directories {DEEPEST} deep"
            raise StoreError(f"{self._files.place.host}:{self._files.told(prefix)[:200]}: {many}")
        below = sorted(key for key, found in listing.items() if found is None)
        known: dict[str, Listing] = {}
        for key, found in sorted(listing.items(), key=lambda each: each[0]):
            if found is not None:
                if isinstance(found, str):
                    self._passed(prefix + key, found)
                elif not self._skips(key):
                    yield Entry(prefix + key, found.size, float(found.mtime))
                continue
            if key not in known:
                several = below[:AT_ONCE]
                known = dict(zip(several, listings(self._files, [prefix + k for k in several]), strict=True))
            below.remove(key)
            yield from self.below(prefix + key, known.pop(key))


class _Directories:
    """Several that are read at once, with one request for each under way, since servers may not like two."""

    def __init__(self, session: Session, files: ServerFiles, prefixes: Sequence[str]) -> None:
        self._session, self._files, self._prefixes = session, files, prefixes
        self._found: list[Listing] = [{} for _ in prefixes]
        self._idle = [0] * len(prefixes)
        self._size = 0

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
            return reply.fields(Kind.HANDLE).handle()
        except Refused as e:
            if e.code != Code.NO_SUCH_FILE:
                raise self._refused(n, e) from e
            return None

    def _is_more(self, n: int, reply: Reply) -> bool:
        """Whether there may be more in it."""
        try:
            more = list(_entries(reply.fields(Kind.NAME)))
        except Refused as e:
            if e.code != Code.EOF:
                raise self._refused(n, e) from e
            return False
        found, before = self._found[n], len(self._found[n])
        found.update(filter(None, more))
        self._size += len(reply.body)
        self._idle[n] = 0 if len(found) > before else self._idle[n] + 1
        if self._size > BYTES or self._idle[n] > IDLE or sum(map(len, self._found)) > MOST:
            many = "its listing does not end" if self._idle[n] > IDLE else f"more than {MOST} files, or {BYTES >> 20} MiB of names"
            raise StoreError(f"{self._files.place.host}:{self._files.told(self._prefixes[n])}: {many}")
        return bool(more)

    def _refused(self, n: int, e: Refused) -> StoreError:
        return refused(self._files.place, self._files.told(self._prefixes[n][:-1]), e)


def _entries(fields: Fields) -> Iterator[tuple[str, Attributes | Odd | None] | None]:
    """What an answer to READDIR names, None for what is nothing of the directory's; what a server calls them is anything."""
    for _ in range(fields.u32()):
        name = fields.text().decode("utf-8", "surrogateescape")
        fields.text()  # as `ls -l` would print it
        found = fields.attributes()
        yield None if name in ("", ".", "..") or _REMAINS.fullmatch(name) else _entry(name, found)


def _entry(name: str, found: Attributes) -> tuple[str, Attributes | Odd | None]:
    if not _is_plain(name):
        return name[:255], "name"
    if found.is_directory:
        return name + "/", None
    return name, found if found.is_file else "link" if found.is_link else "special file"


def _is_plain(name: str) -> bool:
    try:
        return "/" not in name and bool(checked_path(name))
    except Corrupt:
        return False  # left out, as in every store
