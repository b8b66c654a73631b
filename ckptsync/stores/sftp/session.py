"""One SFTP session: requests out, many at once, and their answers, in whatever order they come.

A session is used by one thread at a time.  While reads are asked for, requests are small, and while there are writes the answers are: so neither
pipe can fill up with both sides waiting for the other.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptsync.errors import StoreError
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp.failures import not_sftp
from ckptsync.stores.sftp.link import Link
from ckptsync.stores.sftp.place import Place
from ckptsync.stores.sftp.wire import MOST, VERSION, Code, Fields, Kind, Malformed, Refused, head, reading, text

WINDOW = 64  # requests that are on their way at once
PIECE = 255 << 10  # bytes of a READ or WRITE where the server says that it takes so many; what OpenSSH takes
_LEAST = 32 << 10  # what every server takes (filexfer-02, 3)
_SLOW_S = 540.0  # further patience with a server that brings a file to its disk: ssh itself sees whether the network is dead
_EXTENSIONS = 64
_HEAD = struct.Struct(">IBI")


@dataclass(frozen=True, slots=True)
class Request:
    """``slow``: its answer may take minutes.  ``data``: what a WRITE has behind its fields."""

    kind: Kind
    fields: bytes
    slow: bool = False
    data: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    kind: int
    body: bytes

    @property
    def code(self) -> int | None:
        """Of a STATUS; nothing else has one.  Raises Malformed."""
        return self._status()[0] if self.kind == Kind.STATUS else None

    def fields(self, wanted: Kind) -> Fields:
        """Raises Refused if the server said no, Malformed if it said anything else."""
        if self.kind == Kind.STATUS:
            code, words = self._status()
            if code != Code.OK or wanted != Kind.STATUS:
                raise Refused(code, words)
        elif self.kind != wanted:
            raise Malformed(f"a packet of type {self.kind} came, {wanted} wanted")
        return Fields(self.body)

    def _status(self) -> tuple[int, str]:
        fields = Fields(self.body)
        code = fields.u32()
        return code, "" if fields.is_over else fields.text().decode("utf-8", "replace")


class Session:
    """A connection that has said hello.  ``extensions``: what the server offers beyond the protocol."""

    def __init__(self, place: Place, limits: Limits) -> None:
        self.place, self._pace = place, limits.pace
        self._number = self._unanswered = 0
        self._is_malformed = False
        self.read_size = self.write_size = _LEAST
        self._link = Link(place, limits.stall)
        try:
            self.extensions = self._hello()
            if "limits@openssh.com" in self.extensions:
                self._ask_limits()
        except Malformed as e:
            self.close()
            raise not_sftp(place, e, has_answered=False) from e
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether another request makes sense: nothing is unanswered, nothing broke."""
        return not (self._unanswered or self._is_malformed or self._link.is_over)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def ask(self, *requests: Request) -> list[Reply]:
        """Answers in the order of the requests, all of which were on their way before the first answer was waited for."""
        numbers = self._sent(requests)
        wait = _SLOW_S if any(r.slow for r in requests) else 0.0
        found: dict[int, Reply] = {}
        while len(found) < len(numbers):
            number, reply = self._reply(wait)
            if number not in numbers or number in found:
                raise self._broken(f"an answer to request {number}, which was not asked")
            found[number] = reply
        return [found[number] for number in numbers]

    def answer(self, kind: Kind, fields: bytes, wanted: Kind = Kind.STATUS) -> Fields:
        """What the answer to one request holds; raises Refused."""
        return self.ask(Request(kind, fields))[0].fields(wanted)

    def extended(self, name: str, fields: bytes, wanted: Kind = Kind.STATUS, *, slow: bool = False) -> Fields:
        """As `answer`, of an extension."""
        return self.ask(Request(Kind.EXTENDED, text(name.encode()) + fields, slow))[0].fields(wanted)

    def malformed(self, e: Malformed) -> StoreError:
        """What to raise of it; the connection is used no more."""
        self._is_malformed = True
        return not_sftp(self.place, e, has_answered=True)

    def read_into(self, handle: bytes, start: int, out: memoryview) -> int:
        """Fill ``out``; fewer bytes than it holds are returned only where the file ends.  Raises Refused."""
        end, refusal = len(out), None
        fresh = _pieces(len(out), self.read_size)
        rest: deque[tuple[int, int]] = deque()  # of answers that brought less than was asked for
        asked: dict[int, tuple[int, int]] = {}
        while True:
            while not refusal and len(asked) < WINDOW and (piece := self._next(rest, fresh)):
                if piece[0] < end:
                    asked[self._send(Kind.READ, reading(handle, start + piece[0], piece[1]))] = piece
            if not asked:
                break
            number, kind, size = self._head()
            if number not in asked:
                raise self._broken(f"an answer to request {number}, which was not asked")
            at, wanted = asked.pop(number)
            if kind == Kind.DATA:
                count = self._data(size, out[at : at + wanted])
                if count < wanted:
                    rest.append((at + count, wanted - count))
                continue
            no = self._no(kind, size)
            if no.code == Code.EOF:
                end = min(end, at)
            else:
                refusal = refusal or no
        if refusal:
            raise refusal
        return end

    def read_closing(self, handle: bytes, start: int, out: memoryview) -> int:
        """What one READ brings, also where the file goes on; the file is closed in the same round trip.  Raises Refused."""
        self._pace.take(len(out))
        got, _ = self.ask(Request(Kind.READ, reading(handle, start, len(out))), Request(Kind.CLOSE, text(handle)))
        data = got.fields(Kind.DATA).text()
        if not 0 < len(data) <= len(out):
            raise self._broken(f"{len(data)} bytes came where up to {len(out)} were asked for")
        out[: len(data)] = data
        return len(data)

    def write(self, handle: bytes, start: int, data: memoryview) -> None:
        """All of it; raises Refused."""
        refusal: Refused | None = None
        asked: set[int] = set()
        for request in self.writing(handle, start, data):
            if len(asked) >= WINDOW:
                refusal = self._written(asked) or refusal
            if refusal:
                break
            asked.update(self._sent([request]))
        while asked:
            refusal = self._written(asked) or refusal
        if refusal:
            raise refusal

    def writing(self, handle: bytes, start: int, data: memoryview) -> Iterator[Request]:
        """What `write` asks, for who asks for more at once."""
        for at, size in _pieces(len(data), self.write_size):
            fields = text(handle) + (start + at).to_bytes(8, "big") + size.to_bytes(4, "big")
            yield Request(Kind.WRITE, fields, data=data[at : at + size])

    def _written(self, asked: set[int]) -> Refused | None:
        """What one of the answers says; it is asked no more."""
        number, reply = self._reply()
        if number not in asked:
            raise self._broken(f"an answer to request {number}, which was not asked")
        asked.remove(number)
        try:
            reply.fields(Kind.STATUS)
        except Refused as e:
            return e
        return None

    def _next(self, rest: deque[tuple[int, int]], fresh: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        if rest:
            return rest.popleft()
        piece = next(fresh, None)
        if piece:
            self._pace.take(piece[1])
        return piece

    def _data(self, size: int, out: memoryview) -> int:
        """Bytes that came, straight into ``out``."""
        count = int.from_bytes(self._link.taken(4), "big") if size >= 4 else 0
        if not 0 < count <= len(out) or size != 4 + count:
            raise self._broken(f"{count} bytes in a packet of {size} came where up to {len(out)} were asked for")
        self._link.receive(out[:count])
        return count

    def _no(self, kind: int, size: int) -> Refused:
        reply = Reply(kind, self._body(size))
        try:
            reply.fields(Kind.DATA)
        except Refused as e:
            if e.code != Code.OK:
                return e
        raise self._broken("neither bytes nor a refusal came")

    def _sent(self, requests: Sequence[Request]) -> dict[int, Request]:
        """Each by its number, in their order.  Bytes of files go when they may, and the others not much later."""
        numbers: dict[int, Request] = {}
        buffers: list[bytes | memoryview] = []
        waiting = 0
        for request in requests:
            self._number = (self._number + 1) & 0xFFFFFFFF
            self._unanswered += 1
            numbers[self._number] = request
            size = len(request.data) if request.data is not None else 0
            buffers.append(head(request.kind, self._number, len(request.fields) + size) + request.fields)
            if request.data is not None:
                self._pace.take(size)
                buffers.append(request.data)
                waiting += size
            if waiting >= PIECE:
                self._link.send(*buffers)
                buffers, waiting = [], 0
        self._link.send(*buffers)
        return numbers

    def _send(self, kind: Kind, fields: bytes) -> int:
        (number,) = self._sent([Request(kind, fields)])
        return number

    def _reply(self, wait: float = 0.0) -> tuple[int, Reply]:
        number, kind, size = self._head(wait)
        return number, Reply(kind, self._body(size))

    def _head(self, wait: float = 0.0) -> tuple[int, int, int]:
        """Of the next answer: its request, its type, and how many bytes follow."""
        found = self._link.taken(9, wait)
        size, kind, number = _HEAD.unpack(found)
        if not 5 <= size <= MOST + 1024:
            raise self._broken(f"a packet of {size} bytes came ({found!r})")
        self._unanswered -= 1
        return number, kind, size - 5

    def _body(self, size: int) -> bytes:
        return self._link.taken(size)

    def _broken(self, what: str) -> Malformed:
        """Where the next answer begins is not known any more."""
        self._is_malformed = True
        return Malformed(what)

    def _hello(self) -> dict[str, bytes]:
        """Extensions and what the server says of each."""
        self._link.send(b"\0\0\0\5" + bytes([Kind.INIT]) + VERSION.to_bytes(4, "big"))
        found = self._link.taken(5)
        size = int.from_bytes(found[:4], "big")
        if not 5 <= size <= MOST or found[4] != Kind.VERSION:
            raise Malformed(f"it begins with {found!r}")
        fields = Fields(self._body(size - 1))
        if (version := fields.u32()) != VERSION:
            raise Malformed(f"version {version} is offered, {VERSION} wanted")
        extensions: dict[str, bytes] = {}
        while not fields.is_over and len(extensions) < _EXTENSIONS:
            name, value = fields.text(), fields.text()
            extensions[name.decode("ascii", "replace")] = value
        return extensions

    def _ask_limits(self) -> None:
        """Larger requests, where the server takes them; 0 means that it does not say."""
        try:
            fields = self.extended("limits@openssh.com", b"", Kind.EXTENDED_REPLY)
            packet, read, write = fields.u64(), fields.u64(), fields.u64()
        except Refused:
            return  # it offered what it does not do: the least will be taken
        room = packet - 1024 if packet else PIECE
        self.read_size = min(PIECE, max(_LEAST, min(read, room)))
        self.write_size = min(PIECE, max(_LEAST, min(write, room)))


def _pieces(size: int, each: int) -> Iterator[tuple[int, int]]:
    return ((at, min(each, size - at)) for at in range(0, size, each))
