"""The HTTP server of a process, for ``/metrics`` and ``/healthz``, and what a process shows there.

It is the standard library's, with limits for its clients.  A request has so many seconds, and
bytes, for its head, however it spreads them, and an answer so many seconds to be taken; whoever is
slower is cut off.  Of more connections than `MANY` the oldest one is cut off: open sockets keep
nobody out, and nothing of the process waits for them.  A client that hangs up is no error.
"""

from __future__ import annotations

import contextlib
import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ckptsync.errors import ConfigError
from ckptsync.status.heartbeat import Disk, RunningJob

SLOW = 10.0  # seconds for the whole head of a request, and for the answer to be taken
MANY = 16  # connections at once
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


class PageListener(ThreadingHTTPServer):
    """Listens until it is closed.

    ``where``: ``host:port``, an IPv6 address in brackets; port 0 takes any.  Raises ConfigError.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # else a port that is taken would be no error
    request_queue_size = MANY

    def __init__(self, where: str, pages: Pages) -> None:
        host, _, port = where.rpartition(":")
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        try:
            super().__init__((host.strip("[]"), int(port)), _Request)
        except (OSError, OverflowError) as e:
            reason = e.strerror if isinstance(e, OSError) else "no such port"
            raise ConfigError(
                f"metrics.listen: {where}: {reason}",
                hint="give each service of this machine a port of its own: see metrics.listen",
            ) from e
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.1,), name="web", daemon=True).start()

    def close(self) -> None:
        """Free the port; who is being answered is not waited for."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind; HTTPServer would ask DNS for this machine's name, too."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; where there are too many, the oldest one ends."""
        with self._lock:
            if len(self._open) >= MANY:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its client was quicker
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads may be had
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections; anything else is a bug, and its traceback is printed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    """One request a connection."""

    server_version, sys_version = "ckptsync", ""
    server: PageListener

    def handle(self) -> None:
        """Answer a request whose head comes in time and is not too long."""
        head, has_ended, end = b"", False, time.monotonic() + SLOW
        while not has_ended and len(head) < HEAD:
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            part = self.connection.recv(HEAD - len(head))
            if not part:
                return  # the client has gone, or gave way
            head += part
            has_ended = b"\n\r\n" in head or b"\n\n" in head
        if has_ended:
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            super().handle()

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        known = " and ".join(self.server.pages)
        page = make() if make else Page(404, f"there are {known}\n".encode())
        self.connection.settimeout(SLOW)
        self.send_response(page.status)
        self.send_header("Content-Type", page.content)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Scrapes are no events."""
