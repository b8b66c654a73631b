"""List the files below a directory on an SFTP server, sorted by whole names.

One round trip lists several directories.

A server may make up names, files and directories without end: all of them are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptsync.errors import StoreError
from ckptsync.safe_open import NFS_REMAINS, Odd, Passed, is_plain
from ckptsync.stores.contract import Entry
from ckptsync.stores.posix.part_file import is_unfinished
from ckptsync.stores.sftp.protocol import (
    Attributes,
    Code,
    PacketType,
    Reply,
    Request,
    Session,
    StatusError,
    text,
)
from ckptsync.stores.sftp.server_files import ServerFiles

# directories that are listed together: waiting for a distant server is what listing costs
AT_ONCE = 32
MOST_FILES = 1_000_000  # of directories that are listed together
MOST_BYTES = 128 << 20  # of the server's answers about them
MOST_IDLE = 1000  # answers in a row that bring nothing new
MOST_NAMES = 10_000_000  # files and directories of a store
MOST_DEPTH = 200  # directories in directories

Listing = dict[str, Attributes | Odd | None]
"""By name: a file's attributes, what no file of a checkpoint is, or None for a directory, whose
name ends in a slash: so names sort as whole paths do.
"""


def walk(
    files: ServerFiles,
    prefix: str,
    skips: Callable[[str], bool] = is_unfinished,
    passed: Passed = lambda *_: None,
) -> Iterator[Entry]:
    """Yield every regular file below ``prefix``, except those whose last name is skipped.

    ``prefix`` is empty or ends in "/".

    ``passed`` is called for links, and for all else that is no file of a checkpoint.
    """
    count = 0

    def below(prefix: str, listing: Listing) -> Iterator[Entry]:
        nonlocal count
        count += len(listing) + 1
        if count > MOST_NAMES or prefix.count("/") > MOST_DEPTH:
            many = f"directories {MOST_DEPTH} deep"
            if count > MOST_NAMES:
                many = f"more than {MOST_NAMES} files"
            raise StoreError(f"{files.shown(prefix)[:200]}: {many}")
        directories = sorted(key for key, found in listing.items() if found is None)
        read: dict[str, Listing] = {}
        for key, found in sorted(listing.items(), key=lambda each: each[0]):
            if found is None:
                if key not in read:
                    batch = directories[:AT_ONCE]
                    listings = list_directories(files, [prefix + k for k in batch])
                    read = dict(zip(batch, listings, strict=True))
                directories.remove(key)
                yield from below(prefix + key, read.pop(key))
            elif isinstance(found, str):
                passed(prefix + key, found)
            elif not skips(key):
                yield Entry(prefix + key, found.size, float(found.mtime))

    if files.is_directory(prefix):
        yield from below(prefix, list_directories(files, [prefix])[0])


def subdirectories(files: ServerFiles, prefix: str) -> list[str]:
    """Return the names of the directories directly below ``prefix``, sorted."""
    if not files.is_directory(prefix):
        return []
    listing = list_directories(files, [prefix])[0]
    return sorted(
        key[:-1] for key, found in listing.items() if found is None and not is_unfinished(key[:-1])
    )


def list_directories(files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    """Return what is in each of these directories; nothing where there is none."""
    return files.sessions.on(lambda session: _list(session, files, prefixes))


def _list(session: Session, files: ServerFiles, prefixes: Sequence[str]) -> list[Listing]:
    """List directories with one READDIR for each under way, since servers may not like two."""
    found: list[Listing] = [{} for _ in prefixes]
    idle, size = [0] * len(prefixes), 0
    replies = session.ask(
        *(Request(PacketType.OPENDIR, text(files.path(prefix[:-1]))) for prefix in prefixes)
    )
    handles: dict[int, bytes] = {}
    for n, reply in enumerate(replies):
        try:
            handle = reply.fields(PacketType.HANDLE).handle()
        except StatusError as e:
            if e.code == Code.NO_SUCH_FILE:  # deleted since it was listed
                continue
            raise files.refusal(prefixes[n][:-1], e) from e
        handles[n] = handle
    reading = list(handles)
    while reading:
        replies = session.ask(*(Request(PacketType.READDIR, text(handles[n])) for n in reading))
        reading, asked = [], reading
        for n, reply in zip(asked, replies, strict=True):
            before = len(found[n])
            if _add_names(files, prefixes[n], reply, found[n]):
                reading.append(n)
            size += len(reply.body)
            idle[n] = 0 if len(found[n]) > before else idle[n] + 1
            if idle[n] > MOST_IDLE:
                raise StoreError(f"{files.shown(prefixes[n])}: its listing does not end")
            if size > MOST_BYTES or sum(map(len, found)) > MOST_FILES:
                raise StoreError(
                    f"{files.shown(prefixes[n])}: more than {MOST_FILES} files, or"
                    f" {MOST_BYTES >> 20} MiB of names"
                )
    for handle in handles.values():
        session.close_file(handle)
    return found


def _add_names(files: ServerFiles, prefix: str, reply: Reply, listing: Listing) -> bool:
    """Add the names in an answer to READDIR; return whether there may be more."""
    try:
        fields = reply.fields(PacketType.NAME)
    except StatusError as e:
        if e.code != Code.EOF:
            raise files.refusal(prefix[:-1], e) from e
        return False
    count = fields.u32()
    for _ in range(count):
        name = fields.text().decode("utf-8", "surrogateescape")
        fields.text()  # the line that `ls -l` would print
        found = fields.attributes()
        if name in ("", ".", "..") or NFS_REMAINS.fullmatch(name):
            continue
        if "/" in name or not is_plain(name):
            listing[name[:255]] = "name"
        elif found.is_directory:
            listing[name + "/"] = None
        else:
            listing[name] = found if found.is_file else "link" if found.is_link else "special file"
    return count > 0
