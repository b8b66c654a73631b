"""The HTTP server of a process, for ``/metrics`` and ``/healthz``, and what a process shows there.

A few requests are answered at a time; whoever is slow, or many, is cut off, and nothing of the
process waits for them. A request has so many seconds, and bytes, for its head, however it spreads
them, and an answer so many seconds to be taken. Where all slots are taken, the oldest connection
that waits for its client is closed for the next: open sockets keep nobody out.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal

from ckptsync.errors import ConfigError
from ckptsync.status.heartbeat import Disk, RunningJob

SLOW = 10.0  # seconds for the whole head of a request, and for the answer to be taken
MANY = 16  # at once
HEAD = 16 << 10  # bytes of a request's head


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a process: its ended and its failed runs, and how long it has been busy.

    ``busy`` is in seconds, 0 if the loop rests.
    """

    name: str
    runs: int
    failed: int
    busy: float


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel of alerts: messages that were ``delivered``, tries that ``failed``."""

    channel: str
    delivered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Process:
    """What a process knows of itself.

    ``oldest``: seconds for which the first of the queue has waited; ``errors``: how many its last
    ticks had.
    """

    node: str
    version: str
    roles: tuple[str, ...]
    is_healthy: bool
    loops: Sequence[Loop] = ()
    queue: int = 0
    oldest: float = 0.0
    sent_bytes: int = 0
    errors: int = 0
    disks: Sequence[Disk] = ()
    jobs: Sequence[RunningJob] = ()
    channels: Sequence[Channel] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    body: bytes
    content: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]
"""By path.  Each is made from what is in memory, quickly."""


class PageListener:
    """Listens until it is closed.

    ``where``: ``host:port``, an IPv6 address in brackets; port 0 takes any.  Raises ConfigError.
    """

    def __init__(self, where: str, pages: Pages) -> None:
        host, _, port = where.rpartition(":")
        try:
            self._server = _server(host.strip("[]"), int(port), pages)
        except (OSError, OverflowError) as e:
            reason = e.strerror if isinstance(e, OSError) else "no such port"
            raise ConfigError(
                f"metrics.listen: {where}: {reason}",
                hint="give each service of this machine a port of its own: see metrics.listen",
            ) from e
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="web", daemon=True
        ).start()

    def close(self) -> None:
        """Free the port; who is being answered is not waited for."""
        self._server.shutdown()
        self._server.server_close()


def _server(host: str, port: int, pages: Pages) -> ThreadingHTTPServer:
    class Answering(_Answering):
        answers = pages

    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host, port), Answering)


Waits = Literal["for its head", "for its answer", "to take it"]
GIVE_WAY: tuple[Waits, ...] = ("for its head", "to take it")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MANY

    def __init__(self, *args: Any) -> None:
        self._open: dict[socket.socket, Waits] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._has_room():
            self.shutdown_request(request)
            return
        self.waits(request, "for its head")
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads may be had
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def waits(self, request: socket.socket, what: Waits) -> None:
        """Say what a connection waits for."""
        with self._lock:
            self._open[request] = what

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)

    def _has_room(self) -> bool:
        """Return whether a slot is free, or was freed by closing a slow connection.

        Its thread ends by itself.
        """
        with self._lock:
            if len(self._open) < MANY:
                return True
            slow = (one for what in GIVE_WAY for one, waits in self._open.items() if waits == what)
            if (oldest := next(slow, None)) is None:
                return False
            del self._open[oldest]
        with contextlib.suppress(OSError):  # its client was quicker
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def server_bind(self) -> None:
        """Do what the base class does, without asking DNS for this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections; anything else is a bug, and its traceback is printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Head(io.RawIOBase):
    """Reads the head of an HTTP request, with a limit on time and on bytes."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until, self._left = connection, until, HEAD

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        view = memoryview(out)[: self._left]
        if not view:
            raise ConnectionError("a head without end")
        self._connection.settimeout(max(0.001, self._until - time.monotonic()))
        count = self._connection.recv_into(view)
        self._left -= count
        return count


class _Answering(BaseHTTPRequestHandler):
    """One request a connection."""

    timeout = SLOW
    server_version, sys_version = "ckptsync", ""
    answers: ClassVar[Pages] = {}
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Head(self.connection, time.monotonic() + self.timeout))

    def do_GET(self) -> None:
        page = self._page()
        self._begin(page)
        self.wfile.write(page.body)

    def do_HEAD(self) -> None:
        self._begin(self._page())

    def _page(self) -> Page:
        make = self.answers.get(self.path.partition("?")[0])
        self.server.waits(self.connection, "for its answer")
        page = make() if make else Page(404, f"there are {' and '.join(self.answers)}\n".encode())
        self.server.waits(self.connection, "to take it")
        self.connection.settimeout(self.timeout)  # for all that is given to one `sendall`
        return page

    def _begin(self, page: Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Scrapes are no events."""
