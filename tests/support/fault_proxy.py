"""A proxy between a store and its server that does to connections what networks and servers do to
them.

    lost = once("UploadPart", Break(DOWN, CUT, HEADLESS))
    with closing(HttpProxy(("127.0.0.1", 8333), lost)) as proxy:
        ...  # S3 at 127.0.0.1:{proxy.port}: the response to the first UploadPart is lost

Requests pass unchanged, Host and signature with them.  The faults are those of
`tests.support.network_faults`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import parse_qsl, urlsplit

from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    UP,
    Answer,
    Break,
    Fault,
    Plan,
    Request,
    harmless,
)

PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class _Told:
    """Whose bytes these are, and what is to happen to them."""

    client: socket.socket
    kind: str
    fault: Fault | None


class Broken(Exception):
    """A connection is over, and ends as this says."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class TcpProxy:
    """Passes bytes to ``upstream`` and back, and counts those of bodies: ``bytes[UP]``.

    ``listener``: a socket that listens elsewhere than on the loopback, such as in another network
    namespace.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        plan: Plan = harmless,
        listener: socket.socket | None = None,
    ) -> None:
        self.plan, self._upstream = plan, upstream
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.faults: list[tuple[str, Fault]] = []
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = listener or socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no more, and end every connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._changed:
            for connection in self._open:
                _hush(connection, socket.SHUT_RDWR)

    def passed(self, count: int, timeout: float) -> bool:
        """Return whether ``count`` bytes of bodies or more go up within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.bytes[UP] >= count, timeout)

    def forget(self) -> None:
        """Set all counts to 0, and remove the list of faults."""
        with self._changed:
            self.requests.clear()
            self.bytes.clear()
            self.faults.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server, how = socket.socket(), END
        with self._changed:
            self._open |= {client, server}
        try:
            server.connect(self._upstream)
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._talk(client, server)
        except Broken as e:
            how = e.how
        except OSError:
            how = CUT  # this side sees what happened to the other one
        finally:
            with self._changed:
                self._open -= {client, server}
            _end(server, how)
            _end(client, how)

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        told, ends = _Told(client, "connection", self._asked("connection")), list[str]()

        def pump(source: socket.socket, sink: socket.socket, side: str) -> None:
            try:
                self._send(sink, iter(lambda: source.recv(PIECE), b""), side, told)
                _hush(sink, socket.SHUT_WR)
            except (OSError, Broken) as e:
                ends.append(e.how if isinstance(e, Broken) else CUT)
                _hush(client, socket.SHUT_RD)  # wakes the other direction, and sends nothing
                _hush(server, socket.SHUT_RD)

        back = threading.Thread(target=pump, args=(server, client, DOWN), daemon=True)
        back.start()
        pump(client, server, UP)
        back.join()
        if ends:
            raise Broken(ends[0])

    def _asked(self, kind: str, target: str = "") -> Fault | None:
        with self._changed:
            self.requests[kind] += 1
            fault = self.plan(Request(self.requests.total(), kind, target))
            if fault:
                self.faults.append((kind, fault))
        return fault

    def _send(self, sink: socket.socket, pieces: Iterable[bytes], side: str, told: _Told) -> None:
        """Send all pieces, or as many bytes as the fault lets through; then raise Broken."""
        fault = told.fault if isinstance(told.fault, Break) and told.fault.side == side else None
        for piece in _limited(pieces, fault) if fault else pieces:
            sink.sendall(piece)
            with self._changed:
                self.bytes[side] += len(piece)
                self._changed.notify_all()
        if fault:
            _break(fault, told.client)


class HttpProxy(TcpProxy):
    """Knows where requests and responses begin and end, and what S3 calls them."""

    def _talk(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as requests, server.makefile("rb") as responses:
            while head := _head(requests):
                self._exchange(client, server, requests, responses, head)

    def _exchange(
        self,
        client: socket.socket,
        server: socket.socket,
        requests: BinaryIO,
        responses: BinaryIO,
        head: list[bytes],
    ) -> None:
        method, target, _ = head[0].decode("latin-1").split(" ", 2)
        kind = kind_of(method, target)
        told = _Told(client, kind, self._asked(kind, target))
        body = _body(requests, head, b"0")
        if isinstance(told.fault, Answer) and not told.fault.is_done:
            _answer(client, method, told.fault, body)
            return
        self._pass(server, head, body, UP, told)
        answer = _head(responses)
        if not answer:
            raise Broken(CUT)
        is_bare = method == "HEAD" or answer[0].split()[1] in (b"204", b"304")
        rest = iter(()) if is_bare else _body(responses, answer, b"-1")
        if isinstance(told.fault, Answer):
            _answer(client, method, told.fault, rest)
            return
        self._pass(client, answer, rest, DOWN, told)
        if _header(answer, b"connection").lower() == b"close":
            raise Broken(END)

    def _pass(
        self, sink: socket.socket, head: list[bytes], body: Iterable[bytes], side: str, told: _Told
    ) -> None:
        fault = told.fault
        if isinstance(fault, Break) and (fault.side, fault.after) == (side, HEADLESS):
            _break(fault, told.client)
        sink.sendall(b"".join(head))
        self._send(sink, body, side, told)


def _break(fault: Break, client: socket.socket) -> None:
    if fault.how == STALL:
        _wait_for_end(client)
    raise Broken(fault.how)


def _limited(pieces: Iterable[bytes], fault: Break) -> Iterator[bytes]:
    left = max(fault.after, 0)
    for piece in pieces:
        if len(piece) >= left:
            yield piece[:left]
            return
        yield piece
        left -= len(piece)


def _answer(client: socket.socket, method: str, fault: Answer, unread: Iterable[bytes]) -> None:
    for _ in unread:
        pass
    error = f"<Error><Code>{fault.code}</Code><Message>by the proxy</Message></Error>"
    body = f"<?xml version='1.0'?>{error}".encode()
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    head = f"HTTP/1.1 {fault.status} {fault.code}\r\n{fields}\r\n"
    client.sendall(head.encode() + (b"" if method == "HEAD" else body))


def _head(stream: BinaryIO) -> list[bytes]:
    """Return the lines of a head with the empty one at its end; none where the stream ends.

    Interim responses are skipped.
    """
    lines = [stream.readline()]
    while lines[-1] not in (b"\r\n", b""):
        lines.append(stream.readline())
    if not lines[-1]:
        return []
    return _head(stream) if lines[0].startswith(b"HTTP/1.1 1") else lines


def _header(head: list[bytes], name: bytes) -> bytes:
    fields = (line.partition(b":") for line in head[1:])
    return next((value.strip() for key, _, value in fields if key.lower() == name), b"")


def _body(stream: BinaryIO, head: list[bytes], otherwise: bytes) -> Iterator[bytes]:
    """Yield the raw bytes after a head, with the frames of chunks.

    ``otherwise``: how many if no length is given; -1 is all until the end.
    """
    if _header(head, b"transfer-encoding").lower() == b"chunked":
        yield from _chunked(stream)
        return
    left = int(_header(head, b"content-length") or otherwise)
    while left and (piece := stream.read1(PIECE if left < 0 else min(PIECE, left))):  # type: ignore[attr-defined]
        left -= len(piece) if left > 0 else 0
        yield piece


def _chunked(stream: BinaryIO) -> Iterator[bytes]:
    size = 1
    while size:
        line = stream.readline()
        if not line:
            raise Broken(CUT)
        size = int(line.split(b";")[0], 16)
        yield line + (stream.read(size + 2) if size else b"")
    while (line := stream.readline()).strip():
        yield line  # trailers
    yield line


def kind_of(method: str, target: str) -> str:
    """Return S3's name of a request's operation; the method if it has none.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations.html
    """
    has = {key for key, _ in parse_qsl(urlsplit(target).query, keep_blank_values=True)}
    table = {
        "GET": [
            ("uploads", "ListMultipartUploads"),
            ("uploadId", "ListParts"),
            ("list-type", "ListObjectsV2"),
            ("", "GetObject"),
        ],
        "HEAD": [("", "HeadObject")],
        "PUT": [("uploadId", "UploadPart"), ("", "PutObject")],
        "POST": [("uploads", "CreateMultipartUpload"), ("uploadId", "CompleteMultipartUpload")],
        "DELETE": [("uploadId", "AbortMultipartUpload"), ("", "DeleteObject")],
    }
    return next((kind for key, kind in table.get(method, []) if not key or key in has), method)


def _wait_for_end(client: socket.socket) -> None:
    """Wait until the client or this side has closed; what the client sends is not read."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    poll.poll()


def _hush(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        connection.shutdown(how)


def _end(connection: socket.socket, how: str) -> None:
    if how != END:
        # close then sends a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
