"""A store in a directory of another machine, over SSH.

The directory is as a `PosixStore` on that machine sees it: the same names, and the same temporary names that are never listed.  So it is one store, for who
has it as a local path and for who has it as ``sftp://``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptsync.errors import Corrupt, Exists
from ckptsync.paths import checked_path
from ckptsync.stores.beneath import Passed
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix
from ckptsync.stores.limits import Limits
from ckptsync.stores.parts import PART, Parts
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.sftp.connection import parse_address
from ckptsync.stores.sftp.files import ServerFiles, Sessions
from ckptsync.stores.sftp.listing import subdirectories, walk
from ckptsync.stores.sftp.upload import SftpTarget, find_leftovers
from ckptsync.stores.urls import Remote


class SftpStore:
    """Files below the directory that an sftp:// URL names, which must exist.  Connects when it is first used.

    A file's bytes and its name are durable where the server has ``fsync@openssh.com`` and opens directories, as OpenSSH 6.5 and later do; elsewhere the
    server's disk decides.  ``command``: another program in place of ssh, for tests.
    """

    late = 0.0
    is_exclusive = True  # as OpenSSH's is, and the draft demands (6.5); where a server's rename replaces, `create` only looks first

    def __init__(
        self, remote: Remote, options: Mapping[str, object], limits: Limits | None = None, command: Sequence[str] = ()
    ) -> None:
        limits = limits or Limits()
        address = parse_address(remote, options, command)
        self.url = address.url
        self._files = ServerFiles(Sessions(address, limits))
        self._parts = Parts(limits.threads, limits.memory)

    def has_root(self) -> bool:
        """Return whether the directory is there."""
        return self._files.has_root()

    def missing_parent(self) -> str:
        """Return the directory above it if that is missing, else ""."""
        return self._files.missing_parent()

    def make_root(self) -> None:
        """Make the directory, durably, if it is not there; raise ConfigError where that is refused."""
        self._files.make_root()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        checked_prefix(prefix)
        self._files.check_root()
        yield from walk(self._files, prefix)

    def telling(self, passed: Passed) -> Iterator[Entry]:
        """As `stores.capabilities` says."""
        self._files.check_root()
        yield from walk(self._files, "", passed=passed)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        checked_prefix(prefix)
        self._files.check_root()
        return [name for name in subdirectories(self._files, prefix) if name.startswith(start)]

    def size(self, name: str) -> int:
        """As the contract says."""
        found = self._files.find(_checked(name))
        if found is None:
            raise self._files.not_found(name)
        return found.size

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        count = self._files.read_into(_checked(name), start, out)
        if count < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + count}, {out.nbytes} bytes from {start} wanted")

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._parts.send(SftpTarget(self._files, _checked(name), about, replaces=True), chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        if self._files.find(_checked(name)):
            self._settle(name, about)
            raise Exists(f"{name}: already there")
        self._parts.send(SftpTarget(self._files, name, about, replaces=False), chunks, about)

    def delete(self, name: str) -> None:
        """As the contract says.  Directories that this leaves empty go too: trainers take a directory for a checkpoint."""
        if self._files.find(_checked(name)) is None:
            return
        self._files.remove(name)
        directory = name.rpartition("/")[0]
        self._files.sync_directory(directory)
        while directory and self._files.remove_empty(directory):
            directory = directory.rpartition("/")[0]

    def drafts(self) -> Iterator[Entry]:
        """As `stores.capabilities` says."""
        self._files.check_root()
        yield from (e for e in walk(self._files, "", skips=lambda _: False) if is_unfinished(e.name.rpartition("/")[2]))

    def drop(self, name: str) -> bool:
        """As `stores.capabilities` says: nobody holds a lock here, so that its age has to do."""
        if is_unfinished(checked_path(name).rpartition("/")[2]):
            self._files.remove(name)
        return True

    def _settle(self, name: str, about: About) -> None:
        """Make a name durable whose writer may have been killed, and remove what was left of a write of ours."""
        directory = name.rpartition("/")[0]
        self._files.make_directories(directory)
        self._files.sync_directory(directory)
        if about.size is None or about.size >= PART:
            for left in find_leftovers(self._files, name, about):
                for each in (left.part, *left.records):
                    self._files.remove(each)


def _checked(name: str) -> str:
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name
