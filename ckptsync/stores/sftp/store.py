"""A store in a directory of another machine, over SSH.

OpenSSH's client connects, and knows all about keys, agents, jump hosts and ciphers; SFTP, version 3, is spoken here (`sftp.session`).  The directory is as
a `PosixStore` on that machine sees it: the same names, the same temporary names that are never listed.  So it is one store, for who has it
as a local path and for who has it as ``sftp://``.

``sftp.place``: URL and options.  ``sftp.link``, ``sftp.wire``, ``sftp.session``, ``sftp.pool``: bytes, packets, requests, connections.
``sftp.failures``, ``sftp.space``: what refusals mean.  ``sftp.files``, ``sftp.listing``, ``sftp.ways``: files and directories.  ``sftp.upload``,
``sftp.commit``: writing; ``sftp.creating``, ``sftp.bundle``: small files, several at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptsync.errors import Corrupt, Exists
from ckptsync.paths import checked_path
from ckptsync.stores.beneath import Passed
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, checked_prefix
from ckptsync.stores.limits import Limits
from ckptsync.stores.parts import PART, SMALL, Parts
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.sftp.commit import claim, replace
from ckptsync.stores.sftp.creating import Creating, ToCreate
from ckptsync.stores.sftp.files import ServerFiles
from ckptsync.stores.sftp.listing import directories, walk
from ckptsync.stores.sftp.place import placed
from ckptsync.stores.sftp.pool import Sessions
from ckptsync.stores.sftp.upload import Publish, SftpTarget, left_behind
from ckptsync.stores.sftp.ways import Ways
from ckptsync.stores.urls import Remote


class SftpStore:
    """Files below the directory that an sftp:// URL names, which must exist.  Connects when it is first used.

    What is durable: a file's bytes, and its name, where the server has ``fsync@openssh.com`` and opens directories, as OpenSSH 6.5 and later do; elsewhere
    what the server's disk makes of it.  ``command``: another program in place of ssh, for tests.
    """

    late = 0.0
    is_exclusive = True  # as OpenSSH's is, and the draft wants (6.5); where a server's rename replaces, `create` only looks first

    def __init__(
        self, remote: Remote, options: Mapping[str, object], limits: Limits | None = None, command: Sequence[str] = ()
    ) -> None:
        limits = limits or Limits()
        place = placed(remote, options, command)
        self.url = place.url
        self._sessions = Sessions(place, limits)
        self._files = ServerFiles(self._sessions)
        self._ways = Ways(self._files)
        self._creating = Creating(self._files, self._ways, limits.threads)
        self._parts = Parts(limits.threads, limits.memory)

    def has_root(self) -> bool:
        """Whether the directory is there."""
        return self._files.has_root()

    def missing_parent(self) -> str:
        """The directory above it, if that is not there; else empty."""
        return self._files.missing_parent()

    def make_root(self) -> None:
        """Make the directory, durably, if it is not there; raises ConfigError where that is refused."""
        self._files.make_root()

    def names(self, prefix: str) -> Iterator[Entry]:
        """As the contract says."""
        checked_prefix(prefix)
        self._files.look()
        yield from walk(self._files, prefix)

    def telling(self, passed: Passed) -> Iterator[Entry]:
        """As `stores.listed` says."""
        self._files.look()
        yield from walk(self._files, "", passed=passed)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """As the contract says."""
        checked_prefix(prefix)
        self._files.look()
        return [name for name in directories(self._files, prefix) if name.startswith(start)]

    def size(self, name: str) -> int:
        """As the contract says."""
        found = self._files.found(_checked(name))
        if found is None:
            raise self._files.absent(name)
        return found.size

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As the contract says."""
        count = self._files.read_into(_checked(name), start, out)
        if count < out.nbytes:
            raise Corrupt(f"{name}: ends at byte {start + count}, {out.nbytes} bytes from {start} wanted")

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self._send(name, chunks, about, functools.partial(replace, self._files, _checked(name)))

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        if about.size is not None and about.size <= SMALL:
            self._parts.send(ToCreate(self._creating, _checked(name)), chunks, about)
            return
        try:
            self._creating.refuse_taken(_checked(name))
        except Exists:
            self._clear(name, about)
            raise
        self._send(name, chunks, about, functools.partial(claim, self._files, name))

    def delete(self, name: str) -> None:
        """As the contract says.  Directories that this leaves empty go too: trainers take a directory for a checkpoint."""
        if self._files.found(_checked(name)) is None:
            return
        self._files.remove(name)
        way = name.rpartition("/")[0]
        self._files.sync_directory(way)
        while way and self._files.remove_empty(way):
            self._ways.forget(way)
            way = way.rpartition("/")[0]

    def drafts(self) -> Iterator[Entry]:
        """As `stores.sweeping` says."""
        self._files.look()
        yield from (e for e in walk(self._files, "", skips=lambda _: False) if is_unfinished(e.name.rpartition("/")[2]))

    def drop(self, name: str) -> bool:
        """As `stores.sweeping` says: nobody holds a lock here, so that its age has to do."""
        if is_unfinished(checked_path(name).rpartition("/")[2]):
            self._files.remove(name)
        return True

    def _send(self, name: str, chunks: Iterable[Chunk], about: About, publish: Publish) -> None:
        self._parts.send(SftpTarget(self._files, self._ways, name, about, publish), chunks, about)

    def _clear(self, name: str, about: About) -> None:
        """What was left of a write of ours that somebody else has finished."""
        if about.size is None or about.size >= PART:
            for left in left_behind(self._files, name, about):
                for each in (left.part, *left.records):
                    self._files.remove(each)


def _checked(name: str) -> str:
    if is_unfinished(checked_path(name).rpartition("/")[2]):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name
