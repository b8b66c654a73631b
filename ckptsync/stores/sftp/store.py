"""A store in a directory of another machine, over SSH.

Names and temporary names are those of a `PosixStore`, which may use the same directory on that
machine at the same time: it is one store, as a local path and as ``sftp://``. Requests take a round
trip each, so files are sent in parts over several connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptsync.errors import Exists, StoreError
from ckptsync.safe_names import checked_path
from ckptsync.safe_open import Passed
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix, too_short
from ckptsync.stores.limits import Limits
from ckptsync.stores.part_upload import UploadPool
from ckptsync.stores.posix.draft import checked_name, is_unfinished
from ckptsync.stores.sftp.connection import parse_address
from ckptsync.stores.sftp.draft import PART, SftpTarget
from ckptsync.stores.sftp.server_files import ServerFiles, Sessions
from ckptsync.stores.urls import Remote

MOST_NAMES = 10_000_000  # files and directories of a store, at most: a server may invent them
MOST_DEPTH = 200  # nested directories, at most


class SftpStore:
    """Files below the directory that an sftp:// URL names; it connects when it is first used.

    The directory must exist (`has_root`). A file's bytes and its name are durable where the server
    has ``fsync@openssh.com`` and opens directories, as OpenSSH 6.5 and later do; elsewhere the
    server's disk decides. ``command``: another program in place of ssh, for tests. The constructor
    raises ConfigError.
    """

    late = 0.0
    # OpenSSH's rename refuses a taken name, as filexfer-02 (6.5) demands; where a server's rename
    # replaces, `create` only looks the name up first
    is_exclusive = True

    def __init__(
        self,
        remote: Remote,
        options: Mapping[str, object],
        limits: Limits | None = None,
        command: Sequence[str] = (),
    ) -> None:
        limits = limits or Limits()
        address = parse_address(remote, options, command)
        self.url = address.url
        self._files = ServerFiles(Sessions(address, limits))
        # a part for each connection, and two that are being filled
        memory = min(limits.memory, (limits.threads + 2) * PART)
        self._pool = UploadPool(limits.threads, memory)

    def has_root(self) -> bool:
        """Return whether the directory is there."""
        return self._files.has_root()

    def missing_parent(self) -> str:
        """Return the directory above the root if that is missing, else ""."""
        return self._files.missing_parent()

    def make_root(self) -> None:
        """Make the directory and missing ones above it; raise as `ServerFiles.make_root`."""
        self._files.make_root()

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the stored files below ``prefix`` (see `Store.names`)."""
        checked_prefix(prefix)
        self._files.check_root()
        yield from walk(self._files, prefix)

    def names_reporting(self, passed: Passed) -> Iterator[Entry]:
        """Yield all files; call ``passed`` with each entry that is no file, and its kind."""
        self._files.check_root()
        yield from walk(self._files, "", passed=passed)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the directories directly below ``prefix`` (see `Store.dirs`)."""
        checked_prefix(prefix)
        self._files.check_root()
        if not self._files.is_directory(prefix):
            return []
        listing = self._files.list_directory(prefix)
        names = (key[:-1] for key, attributes in listing.items() if attributes is None)
        return sorted(n for n in names if n.startswith(start) and not is_unfinished(n))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound."""
        attributes = self._files.find(checked_name(name))
        if attributes is None:
            raise self._files.not_found(name)
        return attributes.size

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``; raise NotFound, or Corrupt if the file ends before."""
        count = self._files.read_into(checked_name(name), start, out)
        if count < out.nbytes:
            raise too_short(name, start + count, start, out.nbytes)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of the content, or nothing; replace what has the name (see `Store.write`)."""
        target = SftpTarget(self._files, checked_name(name), about, replaces=True)
        self._pool.send(target, chunks, about, PART)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists if the name is taken (see `Store.create`)."""
        target = SftpTarget(self._files, checked_name(name), about, replaces=False)
        if self._files.find(name):
            target.secure_name()
            raise Exists(f"{name}: already there")
        self._pool.send(target, chunks, about, PART)

    def delete(self, name: str) -> None:
        """Delete a file, durably, and the directories that become empty; do nothing without it.

        Trainers take an empty directory for a checkpoint.
        """
        if self._files.find(checked_name(name)) is None:
            return
        self._files.remove(name)
        directory = name.rpartition("/")[0]
        self._files.sync_directory(directory)
        while directory and self._files.remove_empty(directory):
            directory = directory.rpartition("/")[0]

    def drafts(self) -> Iterator[Entry]:
        """Yield the unfinished files of live and killed writers."""
        self._files.check_root()
        yield from (
            e
            for e in walk(self._files, "", skips=lambda _: False)
            if is_unfinished(e.name.rpartition("/")[2])
        )

    def remove_draft(self, name: str) -> bool:
        """Remove an unfinished file; do nothing to any other. Return True.

        Writers hold no locks, so the caller decides by its age.
        """
        if is_unfinished(checked_path(name).rpartition("/")[2]):
            self._files.remove(name)
        return True


def walk(
    files: ServerFiles,
    prefix: str,
    skips: Callable[[str], bool] = is_unfinished,
    passed: Passed = lambda *_: None,
) -> Iterator[Entry]:
    """Yield every regular file below ``prefix`` ("" or ending in "/"), sorted by name; maybe none.

    ``skips``: whether a file of this last name is left out. ``passed``: called with the name and
    the reason for links, special files, and names that cannot be used. Raise StoreError, also if
    the tree is too large or too deep.
    """
    count = 0

    def below(prefix: str) -> Iterator[Entry]:
        """Yield the files below a directory; raise StoreError above the limits of the tree."""
        nonlocal count
        listing = files.list_directory(prefix)
        count += len(listing) + 1
        if count > MOST_NAMES or prefix.count("/") > MOST_DEPTH:
            many = f"directories {MOST_DEPTH} deep"
            if count > MOST_NAMES:
                many = f"more than {MOST_NAMES} files"
            raise StoreError(f"{files.shown(prefix)[:200]}: {many}")
        for key, value in sorted(listing.items(), key=lambda each: each[0]):
            if value is None:
                yield from below(prefix + key)
            elif isinstance(value, str):
                passed(prefix + key, value)
            elif not skips(key):
                yield Entry(prefix + key, value.size, float(value.mtime))

    if files.is_directory(prefix):
        yield from below(prefix)
