"""An HTTP server that answers as a test's script says, and remembers what it was asked: for what no
S3 server can be made to say.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote


@dataclass
class Asked:
    """A request that came."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Say:
    """A response.

    ``length``: what it says of its body, if that is not true.  A body that is an iterator comes in
    chunks, for as long as it lasts.
    """

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def error(status: int, code: str, **headers: str) -> Say:
    """Return an error as S3 answers it."""
    return Say(status, f"<Error><Code>{code}</Code></Error>".encode(), headers)


class Script:
    """``answers``: what is said to the nth request; a function is asked.

    After the last one, 404 NoSuchKey.
    """

    def __init__(self, *answers: Say | Callable[[Asked], Say]) -> None:
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self.endpoint = ""
        self._lock = threading.Lock()

    def answer(self, asked: Asked) -> Say:
        """Remember a request; return the next answer, or 404 after the last one."""
        with self._lock:
            self.asked.append(asked)
            say = self.answers.pop(0) if self.answers else error(404, "NoSuchKey")
        return say(asked) if callable(say) else say

    def store(self, patience: float = 30.0, **options: Any) -> S3Store:
        """Return a store at this server."""
        given = {
            "key": "AKIDEXAMPLE",
            "secret": "verysecret",
            "endpoint_url": self.endpoint,
            **options,
        }
        return S3Store(Remote("s3", "bucket/pre"), given, Limits(patience=patience, stall=30.0))


@contextlib.contextmanager
def scripted(*answers: Say | Callable[[Asked], Say]) -> Iterator[Script]:
    """Yield the script of a server that runs within the block."""
    script = Script(*answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 64 << 10  # head and body in one packet: else each answer waits 40 ms

        def log_message(self, *_: object) -> None:
            pass

        def _any(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            key = unquote(split.path).removeprefix("/bucket").removeprefix("/")
            query = dict(parse_qsl(split.query, keep_blank_values=True))
            say = script.answer(
                Asked(
                    self.command, key, query, {k.lower(): v for k, v in self.headers.items()}, body
                )
            )
            self.send_response_only(say.status)  # without a Date of its own
            for name, value in say.headers.items():
                self.send_header(name.replace("_", "-"), value)
            if not isinstance(say.body, bytes):
                self._stream(say.body)
                return
            if "Content-Length" not in say.headers:
                self.send_header(
                    "Content-Length", str(len(say.body) if say.length is None else say.length)
                )
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # it may be more than anybody wants
                    self.wfile.write(say.body)
            if say.length is not None:
                self.close_connection = True

        def _stream(self, pieces: Iterator[bytes]) -> None:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing of a client that hung up, but of anything else."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    script.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
