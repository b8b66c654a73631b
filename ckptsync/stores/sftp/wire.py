"""SFTP version 3 as bytes: what is sent, and what came, checked.

Sources: draft-ietf-secsh-filexfer-02 (packets, attributes, statuses), and the file PROTOCOL of OpenSSH (extensions).  Whatever a server
says may be a lie: lengths are checked against the packet before anything is made of them.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 3
MOST = 256 << 10  # bytes of a packet that is no file's content; OpenSSH's own limit
_LONGEST = 256  # bytes of a handle (filexfer-02, 6.3)
_SIZE, _OWNER, _MODE, _TIMES, _EXTENDED = 0x1, 0x2, 0x4, 0x8, 0x80000000


class Kind(IntEnum):
    """Types of packets."""

    INIT = 1
    VERSION = 2
    OPEN = 3
    CLOSE = 4
    READ = 5
    WRITE = 6
    LSTAT = 7
    FSTAT = 8
    FSETSTAT = 10
    OPENDIR = 11
    READDIR = 12
    REMOVE = 13
    MKDIR = 14
    RMDIR = 15
    STAT = 17
    RENAME = 18
    STATUS = 101
    HANDLE = 102
    DATA = 103
    NAME = 104
    ATTRS = 105
    EXTENDED = 200
    EXTENDED_REPLY = 201


class Code(IntEnum):
    """What a STATUS says; servers may have others."""

    OK = 0
    EOF = 1
    NO_SUCH_FILE = 2
    PERMISSION_DENIED = 3
    FAILURE = 4
    BAD_MESSAGE = 5
    NO_CONNECTION = 6
    CONNECTION_LOST = 7
    OP_UNSUPPORTED = 8


class Flag(IntEnum):
    """How a file is opened."""

    READ = 0x01
    WRITE = 0x02
    CREATE = 0x08
    TRUNCATE = 0x10


class Malformed(Exception):
    """The server does not speak SFTP, or not as it should.  `Sessions` makes a StoreError of it, and uses the connection no more."""


class Refused(Exception):
    """The server said no, and goes on serving."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(f"status {code}: {text}")
        self.code, self.text = code, text


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a server says of a file.  ``mtime`` in whole seconds on its clock."""

    size: int
    mode: int
    mtime: int

    @property
    def is_file(self) -> bool:
        """A regular one."""
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        """And no link to one."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """A symbolic one."""
        return stat.S_ISLNK(self.mode)


class Fields:
    """The body of a packet, read from front to back; raises Malformed where it ends before a field does."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    @property
    def is_over(self) -> bool:
        """Whether all of it was read."""
        return self._at >= len(self._body)

    def u32(self) -> int:
        """A number of four bytes."""
        return int.from_bytes(self._take(4), "big")

    def u64(self) -> int:
        """A number of eight bytes."""
        return int.from_bytes(self._take(8), "big")

    def text(self) -> bytes:
        """What the protocol calls a string."""
        return self._take(self.u32())

    def handle(self) -> bytes:
        """Of a file or directory that the server has opened; it is sent with each request."""
        found = self.text()
        if not 0 < len(found) <= _LONGEST:
            raise Malformed(f"a handle of {len(found)} bytes")
        return found

    def attributes(self) -> Attributes:
        """Those that are needed; raises Malformed where the server leaves out what tells a file from a link, or its size."""
        flags = self.u32()
        size = self.u64() if flags & _SIZE else None
        if flags & _OWNER:
            self._take(8)
        mode = self.u32() if flags & _MODE else None
        mtime = (self.u32(), self.u32())[1] if flags & _TIMES else 0
        if flags & _EXTENDED:
            for _ in range(self.u32()):
                self.text(), self.text()
        if mode is None or (size is None and stat.S_ISREG(mode)):
            raise Malformed("the server gives neither type nor size of files")
        if size and size >> 63:
            raise Malformed(f"a file of {size} bytes")
        return Attributes(size or 0, mode, mtime)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise Malformed(f"a packet ends at byte {len(self._body)}, its fields at {end} or later")
        self._at, found = end, self._body[self._at : end]
        return found


def text(value: bytes) -> bytes:
    """What the protocol calls a string: its length, and it."""
    return struct.pack(">I", len(value)) + value


def head(kind: Kind, number: int, size: int) -> bytes:
    """What comes before ``size`` bytes of fields."""
    return struct.pack(">IBI", 5 + size, kind, number)


def reading(handle: bytes, start: int, size: int) -> bytes:
    """The fields of READ."""
    return text(handle) + struct.pack(">QI", start, size)


def opening(path: bytes, flags: int) -> bytes:
    """The fields of OPEN: permissions are what the server's umask leaves of 0666."""
    return text(path) + struct.pack(">II", flags, 0)


def cut_to(handle: bytes, size: int) -> bytes:
    """The fields of FSETSTAT that make a file ``size`` bytes long."""
    return text(handle) + struct.pack(">IQ", _SIZE, size)
