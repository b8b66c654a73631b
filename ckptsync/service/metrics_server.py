"""``metrics.listen``: what /metrics and /healthz say of this process, and the HTTP server for it.

The server is the standard library's, with limits for its clients.  A request has so many seconds,
and bytes, for its head, however it spreads them, and an answer so many seconds to be taken; whoever
is slower is cut off.  Of more such connections than `MANY` the oldest one is cut off, but none
whose page is being made: open sockets keep nobody out.  At most `MANY` pages are made at once, and
/healthz beside them.  A client that hangs up is no error.
"""

from __future__ import annotations

import contextlib
import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.service.process_status import Roles
from ckptsync.threads import start_thread

SLOW = 10.0  # seconds for the whole head of a request, and for the answer to be taken
MANY = 16  # connections at once that send a head or take an answer, and pages that are made
HEAD = 16 << 10  # bytes of a request's head
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
AGAIN = 30.0  # seconds until a port that was taken is tried again


class Metrics:
    """Listens, or tries to.  ``roles``: all that this process does."""

    def __init__(self, config: Config, node: str, roles: Roles) -> None:
        self._config, self._node, self._roles = config, node, roles
        self._listener: PageListener | None = None

    def listen(self) -> None:
        """Listen, if this does not yet; raises ConfigError while the port cannot be had.

        It says what is missing where ckptsync was brought up to date without its dependencies.
        """
        if self._listener is None:
            try:
                from ckptsync.status.metrics import exposition  # noqa: F401, PLC0415
            except ModuleNotFoundError as e:
                why = f"metrics.listen: the package {e.name} is missing"
                raise ConfigError(why, hint="install ckptsync again, with its dependencies") from e
            pages = {"/metrics": self.metrics, "/healthz": self.health}
            self._listener = PageListener(self._config.metrics.listen, pages)

    def close(self) -> None:
        """Free the port."""
        if self._listener:
            self._listener.close()
            self._listener = None

    def metrics(self) -> Page:
        """Return what Prometheus reads."""
        from ckptsync.status.metrics import Loop, Process, exposition  # noqa: PLC0415

        roles, now, head = self._roles, time.monotonic(), self._roles.head
        outcome, running = roles.outcome(), roles.running()
        uploads = [p.since for p in running if p.kind == "upload"]
        process = Process(
            node=self._node,
            version=__version__,
            roles=tuple(self._config.roles),
            is_healthy=not self._hung(),
            loops=[Loop(t.name, t.finished, t.failures, t.busy(now)) for t in roles.all],
            queue=len({p.subject for p in running if p.state != "failed" or p.kind == "upload"}),
            oldest=max(0.0, time.time() - min(uploads)) if uploads else 0.0,
            sent_bytes=roles.sent_bytes(),
            errors=len(outcome.errors),
            disks=roles.disks,
            running=[p for p in running if p.is_moving],
            channels=[sender.channel for sender in head.monitor.senders] if head else (),
        )
        return Page(200, exposition(process, head.monitor.seen if head else None), CONTENT)

    def health(self) -> Page:
        """Return 503 where another start would help."""
        now, hung = time.monotonic(), self._hung()
        lines = [hung or "ok"]
        for task in self._roles.all:
            state = f"at work for {task.busy(now):.0f} s" if task.is_running else "idle"
            lines.append(f"{task.name}: {state}")
        return Page(503 if hung else 200, "\n".join([*lines, ""]).encode())

    def _hung(self) -> str:
        """Return what hangs by the rule of the service's watchdog, or whether that does itself."""
        watchdog = self._roles.watchdog
        if still := watchdog.still():
            return f"hangs: the watchdog has not run for {still:.0f} s"
        return f"hangs: {', '.join(watchdog.found)}" if watchdog.found else ""


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
        self._open: dict[socket.socket, None] = {}  # that may be cut off, the oldest first
        self._making = 0
        try:
            super().__init__((host.strip("[]"), int(port)), _Request)
        except (OSError, OverflowError) as e:
            reason = e.strerror if isinstance(e, OSError) else "no such port"
            raise ConfigError(
                f"metrics.listen: {where}: {reason}",
                hint="give each service of this machine a port of its own: see metrics.listen",
            ) from e
        self.port: int = self.server_address[1]
        try:
            start_thread(partial(self.serve_forever, 0.1), "web")
        except CkptsyncError:
            self.server_close()
            raise

    def close(self) -> None:
        """Free the port; who is being answered is not waited for."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind; HTTPServer would ask DNS for this machine's name, too."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; where there are too many, the oldest one ends."""
        self._may_be_cut(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads may be had
            self.shutdown_request(request)

    def page(self, path: str, request: socket.socket) -> Page:
        """Return the page of a path; nobody cuts its connection off while it is made."""
        make = self.pages.get(path)
        if make is None:
            return Page(404, f"there are {' and '.join(self.pages)}\n".encode())
        with self._lock:
            if self._making >= MANY and path != "/healthz":
                return Page(503, b"too many pages are being made\n")
            self._making += 1
            self._open.pop(request, None)
        try:
            return make()
        finally:
            with self._lock:
                self._making -= 1
            self._may_be_cut(request)

    def _may_be_cut(self, request: socket.socket) -> None:
        with self._lock:
            if len(self._open) >= MANY:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its client was quicker
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None

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
        page = self.server.page(self.path.partition("?")[0], self.connection)
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
