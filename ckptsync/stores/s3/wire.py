"""HTTP/1.1 to one server: connections that are used again, bodies that go straight between the network and the caller's memory.

Why not a library's: botocore's own client, and urllib3, take several times the CPU of http.client for small files (`benchmarks/clients.py`), and none
of them lets a transfer be paced, or its stalls be seen, while it runs.
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
from urllib.parse import unquote, urlsplit

from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.access import Place

PIECE = 256 << 10
TRICKLE = 64 << 10
"""Fewer bytes than this in `Limits.stall` seconds are no transfer."""
MOST = 64 << 20  # bytes of an answer that is not read into the caller's memory
_IDLE = 20.0  # seconds after which servers tend to close a connection


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
    """``count``: bytes that went into the caller's memory; ``body`` has the others."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    count: int = 0


class Cut(http.client.HTTPException):
    """A body ended before its length."""


class Wire:
    """Connections to the places of one store.  Raises OSError and HTTPException; a connection that failed is not used again."""

    def __init__(self, limits: Limits, context: ssl.SSLContext | None, proxy: str, connect_timeout: float) -> None:
        self._limits, self._context, self._proxy, self._connect_timeout = limits, context, proxy, connect_timeout
        self._free: list[tuple[Place, float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        weakref.finalize(self, _close, self._free)

    def exchange(self, place: Place, sending: Sending, out: memoryview | None = None) -> Answer:
        """Send and receive.  The body of a 200 or 206 goes into ``out``, as far as it reaches."""
        connection = self._taken(place)
        try:
            response = self._asked(place, connection, sending)
            flow = _Flow(connection, self._limits, sending.patience)
            is_for_caller = out is not None and response.status in (200, 206)
            count = _fill(response, out, flow) if is_for_caller and out is not None else 0
            body = b"" if is_for_caller else _rest(response, flow, sending.method)
        except BaseException:
            connection.close()
            raise
        if response.will_close or not response.isclosed():
            connection.close()
        else:
            self._give(place, connection)
        return Answer(response.status, response.headers, body, count)

    def _asked(self, place: Place, connection: http.client.HTTPConnection, sending: Sending) -> http.client.HTTPResponse:
        through = self._proxy and not place.is_tls
        connection.putrequest(
            sending.method,
            f"http://{place.host}{sending.target}" if through else sending.target,
            skip_host=True,
            skip_accept_encoding=True,
        )
        for name, value in sending.headers.items():
            connection.putheader(name, value)
        if through:
            for name, value in _proxy_headers(self._proxy).items():
                connection.putheader(name, value)
        try:
            connection.endheaders()
            _send(sending.body, _Flow(connection, self._limits))
        except (BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(OSError, http.client.HTTPException):  # servers refuse a large body before they have read it
                return connection.getresponse()
            raise
        connection.sock.settimeout(self._limits.stall * sending.patience)
        return connection.getresponse()

    def _taken(self, place: Place) -> http.client.HTTPConnection:
        with self._lock:
            if self._pid != os.getpid():
                self._free.clear()  # the parent's connections are the parent's: closing them here does not end them
                self._pid = os.getpid()
            while self._free:
                at, since, connection = self._free.pop()
                if at == place and time.monotonic() - since < _IDLE and not _is_over(connection):
                    return connection
                connection.close()
        return self._made(place)

    def _give(self, place: Place, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._free) < 2 * self._limits.threads + 2:
                self._free.append((place, time.monotonic(), connection))
                return
        connection.close()

    def _made(self, place: Place) -> http.client.HTTPConnection:
        proxy = urlsplit(self._proxy) if self._proxy else None
        at = (proxy.hostname or "", proxy.port or 80) if proxy else _address(place)
        connection: http.client.HTTPConnection
        if place.is_tls:
            connection = http.client.HTTPSConnection(*at, timeout=self._connect_timeout, context=self._context)
            if proxy:
                connection.set_tunnel(*_address(place), headers=_proxy_headers(self._proxy))
        else:
            connection = http.client.HTTPConnection(*at, timeout=self._connect_timeout)
        connection.connect()
        connection.sock.settimeout(self._limits.stall)
        return connection


class _Flow:
    """Sees that bytes move, and that no more of them do than may: the time spent waiting for the pace is nobody's stall."""

    def __init__(self, connection: http.client.HTTPConnection, limits: Limits, patience: float = 1.0) -> None:
        self._sock, self._pace, self._stall = connection.sock, limits.pace, limits.stall * patience
        self._spent, self._moved = 0.0, 0

    def send(self, data: memoryview) -> None:
        self._pace.take(len(data))
        done = 0
        while done < len(data):
            done += self._moving(lambda: self._sock.send(data[done:]))  # noqa: B023  called at once

    def receive(self, step: Callable[[], int]) -> int:
        count = self._moving(step)
        self._pace.take(count)  # what is not taken from the socket is not sent to it: the window closes
        return count

    def _moving(self, step: Callable[[], int]) -> int:
        left = self._stall - self._spent
        if left <= 0:
            raise TimeoutError
        if self._sock is not None:  # http.client lets go of it where the answer ends with the connection
            self._sock.settimeout(left)
        start = time.monotonic()
        count = step()
        self._spent += time.monotonic() - start
        self._moved += count
        if self._moved >= TRICKLE:
            self._spent, self._moved = 0.0, 0
        return count


def _close(free: list[tuple[Place, float, http.client.HTTPConnection]]) -> None:
    for _, _, connection in free:
        connection.close()


def _send(body: bytes | memoryview, flow: _Flow) -> None:
    view = memoryview(body)
    for start in range(0, len(view), PIECE):
        flow.send(view[start : start + PIECE])


def _fill(response: http.client.HTTPResponse, out: memoryview, flow: _Flow) -> int:
    """Bytes of the body that went into ``out``; fewer than it said if it broke off, but an error if nothing came at all."""
    size, done = _length(response, len(out)), 0
    while done < size:
        room = out[done : min(done + PIECE, size)]
        try:
            count = flow.receive(lambda: _step(response, room))  # noqa: B023  called at once
        except (OSError, http.client.HTTPException):
            if not done:
                raise
            return done  # the caller asks for the rest
        if not count:
            break
        done += count
    if size and not done:
        raise Cut(f"0 of {size} bytes came")
    if response.length is not None and not response.chunked:
        response.length -= done
        if not response.length:
            response.close()
    return done


def _step(response: http.client.HTTPResponse, room: memoryview) -> int:
    if response.chunked:
        piece = response.read1(len(room))
        room[: len(piece)] = piece
        return len(piece)
    return response.fp.readinto1(room)  # of the response itself there is only one that waits until all of ``room`` is full


def _length(response: http.client.HTTPResponse, most: int) -> int:
    return most if response.length is None else min(response.length, most)


def _rest(response: http.client.HTTPResponse, flow: _Flow, method: str) -> bytes:
    wanted = response.length if method != "HEAD" else 0
    pieces: list[bytes] = []
    while True:
        flow.receive(lambda: pieces.append(response.read1(PIECE)) or len(pieces[-1]))  # type: ignore[func-returns-value]
        if not pieces[-1]:
            break
        if sum(map(len, pieces)) > MOST:
            raise Cut("an answer without an end")
    body = b"".join(pieces)
    if wanted is not None and len(body) < wanted:
        raise Cut(f"{len(body)} of {wanted} bytes came")
    response.close()
    return body


def _is_over(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed it meanwhile: it says nothing unasked otherwise."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


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
