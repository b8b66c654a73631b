"""HTTP/1.1 to one server: connections that are used again, bodies that go straight between the network and the caller's memory.

Why not a library's: botocore's own client, and urllib3, take several times the CPU for small files (`benchmarks/clients.py`), and none of them
lets a transfer be paced, or its stalls be seen, while it runs.  http.client makes the connections: TLS, and tunnels through proxies.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import ssl
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import cast
from urllib.parse import unquote, urlsplit

from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.access import Place
from ckptsync.stores.s3.answers import Body, Cut, Head, Headers, head
from ckptsync.stores.s3.flow import Flow, wait_at_most
from ckptsync.stores.s3.sinks import Sink

MOST = 8 << 20  # bytes of an answer that is not read into the caller's memory: a page of 1,000 names takes 4 MiB at the very most
SMALL = 64 << 10  # bytes of a body that is sent together with its head
_BUFFER = 64 << 10  # bytes received at once: of a head, and of a small body with it
_IDLE = 20.0  # seconds after which servers tend to close a connection


Begin = Callable[[int, Headers], Sink]
"""From the status and the headers of an answer, before its body, to where the body goes; raises what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A request, signed.  ``target``: path and query, encoded.  ``patience``: how many times `Limits.stall` its answer may take to begin."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | memoryview = b""
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """``count``: bytes that went where the caller wanted them; ``body`` has the others."""

    status: int
    headers: Headers
    body: bytes
    count: int = 0


class Connection:
    """To one place."""

    def __init__(self, made: http.client.HTTPConnection, place: Place, limits: Limits) -> None:
        made.connect()
        self.place, self.since = place, 0.0
        self.sock = made.sock
        self.sock.settimeout(limits.stall)
        self.file = cast("BufferedReader", self.sock.makefile("rb", _BUFFER))

    def is_over(self) -> bool:
        """Whether the server has closed it meanwhile: it says nothing unasked otherwise."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Not used again."""
        self.file.close()
        self.sock.close()


class Wire:
    """Connections to the places of one store.  Raises OSError and HTTPException; a connection that failed is not used again."""

    def __init__(self, limits: Limits, context: ssl.SSLContext | None, proxy: str, connect_timeout: float) -> None:
        self._limits, self._context, self._proxy, self._connect_timeout = limits, context, proxy, connect_timeout
        self._free: list[Connection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._free)

    def exchange(self, place: Place, sending: Sending, begin: Begin | None = None) -> Answer:
        """Send and receive.  The body of a 200 or 206 goes where ``begin`` says, as far as there is room."""
        connection = self._taken(place)
        try:
            found = self._asked(connection, sending)
            body = Body(connection.file, found, sending.method)
            flow = Flow(connection.sock, self._limits, sending.patience)
            count, rest = 0, b""
            if begin and found.status in (200, 206):
                count = _fill(body, begin(found.status, found.headers), flow)
            else:
                rest = _rest(body, flow)
        except BaseException:
            connection.close()
            raise
        if body.is_over and not body.ends_connection:
            self._give(connection)
        else:
            connection.close()
        return Answer(found.status, found.headers, rest, count)

    def _asked(self, connection: Connection, sending: Sending) -> Head:
        flow, head_ = Flow(connection.sock, self._limits), self._head(connection.place, sending)
        try:
            if len(sending.body) <= SMALL:
                flow.send_together(head_, sending.body)
            else:
                connection.sock.sendall(head_)
                flow.send(sending.body)
        except (BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(OSError, http.client.HTTPException):  # servers refuse a large body before they have read it
                return head(connection.file)
            raise
        wait_at_most(connection.sock, self._limits.stall * sending.patience)
        return head(connection.file)

    def _head(self, place: Place, sending: Sending) -> bytes:
        headers, target = sending.headers, sending.target
        if self._proxy and not place.is_tls:
            headers, target = {**headers, **_proxy_headers(self._proxy)}, f"http://{place.host}{target}"
        lines = [f"{sending.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        text = "\r\n".join(lines)
        if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
            raise ValueError("a line break in a header")
        return text.encode("latin-1")

    def _taken(self, place: Place) -> Connection:
        with self._lock:
            if self._pid != os.getpid():
                self._free.clear()  # the parent's connections are the parent's: closing them here does not end them
                self._pid = os.getpid()
            while self._free:
                connection = self._free.pop()
                if connection.place == place and time.monotonic() - connection.since < _IDLE and not connection.is_over():
                    return connection
                connection.close()
        return self._made(place)

    def _give(self, connection: Connection) -> None:
        connection.since = time.monotonic()
        with self._lock:
            if len(self._free) < 2 * self._limits.threads + 2:
                self._free.append(connection)
                return
        connection.close()

    def _made(self, place: Place) -> Connection:
        proxy = urlsplit(self._proxy) if self._proxy else None
        at = (proxy.hostname or "", proxy.port or 80) if proxy else _address(place)
        made: http.client.HTTPConnection
        if place.is_tls:
            made = http.client.HTTPSConnection(*at, timeout=self._connect_timeout, context=self._context)
            if proxy:
                made.set_tunnel(*_address(place), headers=_proxy_headers(self._proxy))
        else:
            made = http.client.HTTPConnection(*at, timeout=self._connect_timeout)
        return Connection(made, place, self._limits)


def _close(free: list[Connection]) -> None:
    for connection in free:
        connection.close()


def _fill(body: Body, sink: Sink, flow: Flow) -> int:
    """Bytes of the body that went to ``sink``; fewer than it said if it broke off, but an error if nothing came at all."""
    before, wanted = sink.done, sink.size - sink.done
    wanted = wanted if body.left is None else min(body.left, wanted)
    while sink.done - before < wanted:
        try:
            count = flow.receive(body.read_into, sink.room())
        except (OSError, http.client.HTTPException):
            if sink.done == before:
                raise
            break  # the caller asks for the rest
        if not count:
            break
        sink.took(count)
    if wanted and sink.done == before:
        raise Cut(f"0 of {wanted} bytes came")
    return sink.done - before


def _rest(body: Body, flow: Flow) -> bytes:
    found, room = bytearray(), memoryview(b"")
    while not body.is_over:
        room = room or memoryview(bytearray(_BUFFER))
        found += room[: flow.receive(body.read_into, room)]
        if len(found) > MOST:
            raise Cut("an answer without an end")
    if body.left:
        raise Cut(f"{body.left} bytes did not come")
    return bytes(found)


def _address(place: Place) -> tuple[str, int]:
    split = urlsplit(f"//{place.host}")
    return split.hostname or "", split.port or (443 if place.is_tls else 80)


def _proxy_headers(proxy: str) -> dict[str, str]:
    """A proxy's URL may name a user."""
    split = urlsplit(proxy)
    if not split.username:
        return {}
    user = f"{unquote(split.username)}:{unquote(split.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}
