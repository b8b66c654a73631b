"""SFTP version 3: packets as bytes, and sessions that have many requests in flight.

A round trip takes milliseconds, so a session sends many requests before it reads their answers, and
file bytes go straight from and to the caller's memory. A server may lie: every length is checked
against its packet before it is used, and after an answer that makes no sense the session is closed.

Sources: draft-ietf-secsh-filexfer-02 (packets, attributes, statuses) and OpenSSH's file PROTOCOL
(extensions). One thread uses a session at a time. Requests to read are small, and answers to writes
are small: so the pipes in both directions can never be full at once, with both sides waiting for
each other.
"""

from __future__ import annotations

import contextlib
import stat
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ckptsync.stores import progress_signs
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp.connection import Address, Connection

VERSION = 3
FSYNC = "fsync@openssh.com"
RENAME_OVER = "posix-rename@openssh.com"
PIECE = 255 << 10  # bytes of a READ or WRITE, if the server accepts so many: OpenSSH's limit
_LEAST_PIECE = 32 << 10  # bytes that every server accepts (filexfer-02, 3)
_MOST_PACKET = 256 << 10  # bytes of any packet; OpenSSH's limit
_MOST_HANDLE = 256  # bytes of a handle (filexfer-02, 6.3)
_MOST_EXTENSIONS = 64
_READS = 64  # READs that wait for their answers at once
# s to wait longer for an answer if the server may bring a file to its disk: ssh itself notices a
# dead network
FSYNC_PATIENCE = 540.0
_SIZE, _OWNER, _MODE, _TIMES, _EXTENDED = 0x1, 0x2, 0x4, 0x8, 0x80000000
_HEAD = struct.Struct(">IBI")


class PacketType(IntEnum):
    """Types of packets."""

    INIT = 1
    VERSION = 2
    OPEN = 3
    CLOSE = 4
    READ = 5
    WRITE = 6
    LSTAT = 7
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
    """Codes of a STATUS packet; servers may have further ones."""

    OK = 0
    EOF = 1
    NO_SUCH_FILE = 2
    PERMISSION_DENIED = 3
    FAILURE = 4
    NO_CONNECTION = 6
    CONNECTION_LOST = 7


class Flag(IntEnum):
    """How a file is opened."""

    READ = 0x01
    WRITE = 0x02
    CREATE = 0x08
    TRUNCATE = 0x10


class Malformed(Exception):
    """The server does not speak SFTP, or not correctly."""


class StatusError(Exception):
    """The server refused a request, and goes on serving."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(f"status {code}: {text}")
        self.code, self.text = code, text


@dataclass(frozen=True, slots=True)
class Attributes:
    """A file's attributes from the server. ``mtime``: whole seconds on the server's clock."""

    size: int
    mode: int
    mtime: int

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, and no link to one."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.mode)


class Fields:
    """The body of a packet, read from front to back; reading beyond its end raises Malformed."""

    def __init__(self, body: bytes) -> None:
        self._body, self._position = body, 0

    @property
    def is_over(self) -> bool:
        """Whether all of the body was read."""
        return self._position >= len(self._body)

    def u32(self) -> int:
        """Read a number of four bytes."""
        return int.from_bytes(self._read_bytes(4), "big")

    def u64(self) -> int:
        """Read a number of eight bytes."""
        return int.from_bytes(self._read_bytes(8), "big")

    def text(self) -> bytes:
        """Read a string of the protocol: its length, then its bytes."""
        return self._read_bytes(self.u32())

    def attributes(self) -> Attributes:
        """Read a file's attributes; 0 for a missing mtime, and for another file's missing size.

        Raise Malformed if its type is missing, or a regular file's size, or that is above 2^63 - 1.
        """
        flags = self.u32()
        size = self.u64() if flags & _SIZE else None
        if flags & _OWNER:
            self._read_bytes(8)
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

    def _read_bytes(self, count: int) -> bytes:
        """Read ``count`` bytes; raise Malformed if the body ends before."""
        end = self._position + count
        if end > len(self._body):
            raise Malformed(
                f"a packet ends at byte {len(self._body)}, its fields at {end} or later"
            )
        self._position, data = end, self._body[self._position : end]
        return data


def text(value: bytes) -> bytes:
    """Return a string of the protocol: its length, and its bytes."""
    return struct.pack(">I", len(value)) + value


@dataclass(frozen=True, slots=True)
class Request:
    """A packet to send.

    ``data``: the bytes that follow the fields of a WRITE. ``out``: the memory that the bytes of an
    answer to a READ are received into.
    """

    kind: PacketType
    fields: bytes
    data: memoryview | None = None
    out: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ``count``: bytes of a file that came with it, received into `Request.out`."""

    kind: int
    body: bytes
    count: int = 0

    def fields(self, kind: PacketType = PacketType.STATUS) -> Fields:
        """Return the fields of an answer of this kind.

        Raise StatusError if the server refused the request, Malformed for an answer of another
        kind.
        """
        fields = Fields(self.body)
        if self.kind == PacketType.STATUS:
            code = fields.u32()
            message = "" if fields.is_over else fields.text().decode("utf-8", "replace")
            if code != Code.OK or kind != PacketType.STATUS:
                raise StatusError(code, message)
        elif self.kind != kind:
            raise Malformed(f"a packet of type {self.kind} came, {kind} was expected")
        return fields

    def handle(self) -> bytes:
        """Return the server's handle of an opened file; raise as `fields`."""
        name = self.fields(PacketType.HANDLE).text()
        if not 0 < len(name) <= _MOST_HANDLE:
            raise Malformed(f"a handle of {len(name)} bytes")
        return name

    def attributes(self) -> Attributes | None:
        """Return a file's attributes, None if there is no such file; else raise as `fields`."""
        try:
            return self.fields(PacketType.ATTRS).attributes()
        except StatusError as e:
            if e.code != Code.NO_SUCH_FILE:
                raise
            return None


class Session:
    """An SFTP session on a connection of its own.

    ``extensions``: names of what the server offers beyond the protocol. The constructor connects.
    Methods raise Malformed, StatusError if the server refuses a request, and as `Connection`.
    """

    def __init__(self, address: Address, limits: Limits) -> None:
        self.read_size = self.write_size = _LEAST_PIECE
        self._pace = limits.pace
        self._number = 0
        self._pending: dict[int, Request] = {}  # requests whose answers have not come
        self._connection = Connection(address, limits.stall)
        try:
            self.extensions = self._negotiate_version()
            if "limits@openssh.com" in self.extensions:
                self._set_request_sizes()
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether another step can use it: no answer is missing, and the connection is open."""
        is_waited_for = any(request.kind != PacketType.CLOSE for request in self._pending.values())
        return not (is_waited_for or self._connection.is_over)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def exchange(self, *requests: Request) -> list[Reply]:
        """Send all requests, then wait for their answers; return these in the same order.

        A refusal is not raised here, but by its `Reply`. With an EXTENDED request, such as fsync,
        it waits `FSYNC_PATIENCE` seconds longer.
        """
        numbers = self._send(requests)
        patience = FSYNC_PATIENCE if any(r.kind == PacketType.EXTENDED for r in requests) else 0.0
        replies: dict[int, Reply] = {}
        while len(replies) < len(numbers):
            number, reply = self._receive(patience)
            replies[number] = reply
        return [replies[number] for number in numbers]

    def do(self, *requests: Request) -> None:
        """Send all, wait for all answers; raise StatusError for the first that is refused."""
        for reply in self.exchange(*requests):
            reply.fields()

    def stat_paths(
        self,
        paths: Iterable[bytes],
        kind: PacketType = PacketType.LSTAT,
        before: Sequence[Request] = (),
    ) -> list[Attributes | None]:
        """Return the attributes of each path, None if there is nothing, in one round trip.

        ``kind``: STAT follows a link at the end of a path, LSTAT does not. ``before``: requests
        that are sent first; StatusError if one is refused.
        """
        replies = self.exchange(*before, *(Request(kind, text(p)) for p in paths))
        for reply in replies[: len(before)]:
            reply.fields()
        return [reply.attributes() for reply in replies[len(before) :]]

    def make_directory(self, path: bytes) -> Attributes:
        """Make a directory unless the path exists; return the attributes of what is there.

        Raise StatusError if it was refused, or if it is gone again.
        """
        mkdir_reply, lstat_reply = self.exchange(
            Request(PacketType.MKDIR, text(path) + bytes(4)), Request(PacketType.LSTAT, text(path))
        )
        if attributes := lstat_reply.attributes():
            return attributes
        mkdir_reply.fields()
        raise StatusError(Code.NO_SUCH_FILE)

    @contextlib.contextmanager
    def opened(
        self, path: bytes, flags: int = 0, before: Sequence[Request] = ()
    ) -> Iterator[bytes]:
        """Open a file, or without ``flags`` a directory; yield its handle, and close it afterwards.

        ``before``: requests that are sent first, in the same round trip; StatusError if one is
        refused. A new file has the permissions that the server's umask leaves of 0666. The answer
        to closing is not waited for: nothing depends on it.
        """
        *replies, reply = self.exchange(*before, _open_request(path, flags))
        handle = reply.handle()
        try:
            for each in replies:
                each.fields()
            yield handle
        finally:
            if self.is_usable:
                self._send([Request(PacketType.CLOSE, text(handle))])

    def fsync_requests(self, handle: bytes) -> list[Request]:
        """Return the request that brings a file, or a directory's names, to the server's disk.

        Empty if the server does not offer it.
        """
        fields = text(FSYNC.encode()) + text(handle)
        is_offered = FSYNC in self.extensions
        return [Request(PacketType.EXTENDED, fields)] if is_offered else []

    def write_requests(self, handle: bytes, start: int, data: memoryview) -> Iterator[Request]:
        """Yield the requests that write ``data`` at ``start``."""
        for offset in range(0, len(data), self.write_size):
            fields = text(handle) + struct.pack(">Q", start + offset)
            piece = data[offset : offset + self.write_size]
            yield Request(PacketType.WRITE, fields + struct.pack(">I", len(piece)), data=piece)

    def read_into(self, handle: bytes, start: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``start``, within the rate limit; return the number of bytes read.

        They are fewer than ``out`` holds only if the file ends before. Raise StatusError, after all
        answers came, if the server refuses.
        """
        end, refusal = len(out), None
        size = self.read_size
        # ranges of `out` (first byte, end) not requested yet; and those requested, by number
        ranges = deque((first, min(first + size, end)) for first in range(0, end, size))
        requested: dict[int, tuple[int, int]] = {}
        while True:
            while ranges and not refusal and len(requested) < _READS:
                first, stop = ranges.popleft()
                if first < end:
                    self._pace.take(stop - first)
                    fields = text(handle) + struct.pack(">QI", start + first, stop - first)
                    request = Request(PacketType.READ, fields, out=out[first:stop])
                    requested[self._send([request])[0]] = first, stop
            if not requested:
                break
            number, reply = self._receive()
            first, stop = requested.pop(number)
            if reply.kind == PacketType.DATA:
                if first + reply.count < stop:  # a short answer: request the missing bytes
                    ranges.appendleft((first + reply.count, stop))
                continue
            try:
                reply.fields(PacketType.DATA)
            except StatusError as e:
                if e.code == Code.EOF:
                    end = min(end, first)
                else:
                    refusal = refusal or e
        if refusal:
            raise refusal
        return end

    def _send(self, requests: Sequence[Request]) -> list[int]:
        """Send requests; return their numbers.

        Bytes of files wait until the rate limit allows them.
        """
        numbers: list[int] = []
        buffers: list[bytes | memoryview] = []
        unsent_bytes = 0
        for request in requests:
            self._number = (self._number + 1) & 0xFFFFFFFF
            self._pending[self._number] = request
            numbers.append(self._number)
            size = len(request.data) if request.data is not None else 0
            head = _HEAD.pack(5 + len(request.fields) + size, request.kind, self._number)
            buffers.append(head + request.fields)
            if request.data is not None:
                self._pace.take(size)
                progress_signs.count_sent(size)
                buffers.append(request.data)
                unsent_bytes += size
            if unsent_bytes >= PIECE:
                self._connection.send(*buffers)
                buffers, unsent_bytes = [], 0
        self._connection.send(*buffers)
        return numbers

    def _receive(self, patience: float = 0.0) -> tuple[int, Reply]:
        """Return the number of a request, and its answer: the next one but answers to CLOSE.

        Raise Malformed for an answer to no request, or of an impossible size.
        """
        while True:
            head = self._connection.receive_bytes(9, patience)
            size, kind, number = _HEAD.unpack(head)
            if not 5 <= size <= _MOST_PACKET + 1024:
                # where the next answer begins is unknown
                raise Malformed(f"a packet of {size} bytes came ({head!r})")
            if (request := self._pending.pop(number, None)) is None:
                raise Malformed(f"an answer to request {number}, which was not asked")
            if kind == PacketType.DATA and request.out is not None:
                return number, Reply(kind, b"", self._receive_data(size - 5, request.out))
            body = self._connection.receive_bytes(size - 5)
            if request.kind != PacketType.CLOSE:
                return number, Reply(kind, body)

    def _receive_data(self, size: int, out: memoryview) -> int:
        """Receive the bytes of a DATA packet into ``out``; return how many they are.

        Raise Malformed if they are none, more than ``out`` holds, or not the rest of the packet.
        """
        count = int.from_bytes(self._connection.receive_bytes(4), "big") if size >= 4 else 0
        if not 0 < count <= len(out) or size != 4 + count:
            raise Malformed(
                f"{count} bytes in a packet of {size} came where up to {len(out)} were asked for"
            )
        self._connection.receive(out[:count])
        return count

    def _negotiate_version(self) -> set[str]:
        """Send our version; return the names of the server's extensions.

        Raise Malformed if the server's version is another one.
        """
        self._connection.send(b"\0\0\0\5" + bytes([PacketType.INIT]) + VERSION.to_bytes(4, "big"))
        head = self._connection.receive_bytes(5)
        size = int.from_bytes(head[:4], "big")
        if not 5 <= size <= _MOST_PACKET or head[4] != PacketType.VERSION:
            raise Malformed(f"it begins with {head!r}")
        fields = Fields(self._connection.receive_bytes(size - 1))
        if (version := fields.u32()) != VERSION:
            raise Malformed(f"the server offers version {version}, {VERSION} is needed")
        extensions: set[str] = set()
        while not fields.is_over and len(extensions) < _MOST_EXTENSIONS:
            extensions.add(fields.text().decode("ascii", "replace"))
            fields.text()  # its version
        return extensions

    def _set_request_sizes(self) -> None:
        """Ask how large requests may be; set that, 32 to 255 KiB, unless the server refuses."""
        try:
            (reply,) = self.exchange(Request(PacketType.EXTENDED, text(b"limits@openssh.com")))
            fields = reply.fields(PacketType.EXTENDED_REPLY)
            most_packet, most_read, most_write = fields.u64(), fields.u64(), fields.u64()
        except StatusError:
            return  # it offers what it cannot do
        most_piece = most_packet - 1024 if most_packet else PIECE
        self.read_size = min(PIECE, max(_LEAST_PIECE, min(most_read, most_piece)))
        self.write_size = min(PIECE, max(_LEAST_PIECE, min(most_write, most_piece)))


def _open_request(path: bytes, flags: int) -> Request:
    """Return the request that opens a file, or without ``flags`` a directory."""
    if not flags:
        return Request(PacketType.OPENDIR, text(path))
    return Request(PacketType.OPEN, text(path) + struct.pack(">II", flags, 0))
