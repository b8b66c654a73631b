"""Connections: used again, given up when nothing moves, paced, and trusted."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import ConfigError, Transient
from ckptsync.stores.limits import Limits
from ckptsync.stores.s3 import transport
from ckptsync.stores.s3.requests import base64_of
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.rate_limits import Counted
from tests.support.scripted_s3 import Say, scripted

STORED = b'HTTP/1.1 200 OK\r\nETag: "t"\r\nContent-Length: 0\r\n\r\n'
BIG = 32 << 20


class Server:
    """Each connection is handled by ``talk``, with its number."""

    def __init__(self, talk: Callable[[socket.socket, int], object]) -> None:
        self._listener, self._talk = socket.create_server(("127.0.0.1", 0)), talk
        self.connections = 0
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.connections += 1
            threading.Thread(
                target=self._serve, args=(connection, self.connections), daemon=True
            ).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError):  # the other side may leave
            self._talk(connection, number)


def request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 20)
    return data


def storing(connection: socket.socket, _number: int) -> None:
    while request(connection):
        connection.sendall(STORED)


def store_at(
    host: str, stall: float = 30.0, pace: Any = None, scheme: str = "http", **options: Any
) -> S3Store:
    limits = Limits(patience=0, stall=stall, memory=BIG * 4, **({"pace": pace} if pace else {}))
    store = S3Store(
        Remote("s3", "b"),
        {"key": "k", "secret": "s", "endpoint_url": f"{scheme}://{host}", **options},
        limits,
    )
    store.least = BIG + 1  # nothing is cut into parts
    return store


def saying(answer: bytes, *, then: float = 0.0) -> Server:
    def talk(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(answer)
        threading.Event().wait(then)

    return Server(talk)


def test_a_connection_is_used_again() -> None:
    server = Server(storing)
    store = store_at(server.host)
    for _ in range(5):
        store.write("a", [b"x"])
    assert server.connections == 1


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\nx"])
def test_a_server_that_falls_silent_is_given_up(said: bytes) -> None:
    with pytest.raises(Transient, match="silent"):
        list(store_at(saying(said, then=60).host, stall=0.3).names(""))


def test_a_server_that_trickles_is_given_up() -> None:
    def trickling(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(
            b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-499999/500000\r\nContent-Length:"
            b" 500000\r\n\r\n"
        )
        for _ in range(300):
            connection.sendall(b"x")
            time.sleep(0.2)

    with pytest.raises(Transient, match=r"of 500000 bytes came"):
        store_at(Server(trickling).host, stall=1.0).read_into("a", 0, memoryview(bytearray(500000)))


def test_a_server_that_does_not_take_the_body_is_given_up() -> None:
    def deaf(connection: socket.socket, _number: int) -> None:
        connection.recv(10)
        threading.Event().wait(60)

    with pytest.raises(Transient, match="silent"):
        store_at(Server(deaf).host, stall=0.3).write("a", [bytes(BIG)])


class Slow(Counted):
    """By this clock each piece has to wait for a minute, and to receive takes a second."""

    waited = 0.0

    def take(self, count: int) -> None:
        super().take(count)
        self.waited += 60

    def monotonic(self) -> float:
        self.waited += 1
        return self.waited


def test_bytes_up_and_down_are_paced_in_small_pieces_and_waiting_for_the_pace_is_no_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace, size = Slow(), 40 * Slow.piece + 5
    monkeypatch.setattr(transport, "time", pace)
    body, out = b"y" * size, bytearray(size)
    with scripted(
        Say(200, b"", {"ETag": '"t"'}),
        Say(206, body, {"Content-Range": f"bytes 0-{size - 1}/{size}"}),
    ) as script:
        store = store_at(script.endpoint.partition("//")[2], pace=pace)
        store.write("a", [body])
        assert script.asked[0].body == body
        assert sum(pace.taken) == size
        store.read_into("a", 0, memoryview(out))
    assert out == body
    assert sum(pace.taken) == 2 * size
    assert max(pace.taken) <= pace.piece


def test_what_breaks_off_is_asked_for_from_there_and_a_listing_that_does_is_an_error() -> None:
    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n1234"
    with pytest.raises(Transient, match="4 of 10 bytes"):
        store_at(saying(head).host).read_into("a", 0, memoryview(bytearray(10)))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n<ListBucketResult/>"
    with pytest.raises(Transient, match="ended early"):
        list(store_at(saying(head).host).names(""))


def test_a_body_in_chunks_is_read_too() -> None:
    ranged = {"Content-Range": "bytes 0-4/5"}
    with scripted(
        Say(200, iter([b"<ListBucket", b"Result/>"])), Say(206, iter([b"abc", b"de"]), ranged)
    ) as script:
        store, out = script.store(), bytearray(5)
        assert list(store.names("")) == []
        store.read_into("a", 0, memoryview(out))
        assert out == b"abcde"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_tls_is_spoken_with_whom_the_bundle_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    heard: list[bytes] = []
    crc = base64_of(zlib.crc32(b"x" * 1000))
    stored = STORED.replace(b"ETag", f"x-amz-checksum-crc32: {crc}\r\nETag".encode())

    def spoken(connection: socket.socket, _number: int) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            while found := request(tls):
                heard.append(found)
                tls.sendall(stored)

    server = Server(spoken)
    host = server.host.replace("127.0.0.1", "localhost")
    store = store_at(host, scheme="https", client_kwargs={"verify": str(cert)})
    for _ in range(2):
        store.write("a", [b"x" * 1000])
    assert server.connections == 1
    assert b"UNSIGNED-PAYLOAD" in heard[0], "TLS and a checksum protect it"
    for variable in ("", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        with monkeypatch.context() as patch:
            patch.delenv("AWS_CA_BUNDLE", raising=False)
            patch.delenv("REQUESTS_CA_BUNDLE", raising=False)
            patch.setenv(variable or "OTHER", "/no/such/bundle")
            text = "certificates cannot be read" if variable else "is not trusted"
            with pytest.raises(ConfigError, match=text):
                store_at(host, scheme="https").write("a", [b"x"])


def test_a_proxy_is_asked_for_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []

    def proxy(connection: socket.socket, _number: int) -> None:
        heard.append(request(connection))
        connection.sendall(STORED)

    proxies = {"http": f"http://me:p%40ss@{Server(proxy).host}"}
    store_at("s3.example", config_kwargs={"proxies": proxies}).write("a", [b"x"])
    assert heard[0].startswith(b"PUT http://s3.example/b/a HTTP/1.1")
    assert b"\r\nproxy-authorization: basic bwu6cebzcw==" in heard[0].lower()
    monkeypatch.setenv("http_proxy", f"http://{Server(proxy).host}")
    store_at("s3.example").write("a", [b"x"])
    assert heard[1].startswith(b"PUT http://s3.example/b/a HTTP/1.1")
