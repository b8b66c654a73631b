"""Connections: used again, given up when nothing moves, paced, and not shared with a child process."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.limits import Limits
from ckptsync.stores.s3.access import Place
from ckptsync.stores.s3.sinks import Into
from ckptsync.stores.s3.wire import Answer, Sending, Wire
from tests.paced import Counted

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Each connection is handled by ``talk``, with its number."""

    def __init__(self, talk: Callable[[socket.socket, int], object]) -> None:
        self._listener, self._talk = socket.create_server(("127.0.0.1", 0)), talk
        self.connections = 0
        self.place = Place(is_tls=False, host=f"127.0.0.1:{self._listener.getsockname()[1]}", root="/b/", region="r")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

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
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 20)
    return data


def echoing(connection: socket.socket, _number: int) -> None:
    while request(connection):
        connection.sendall(OK)


def wire(stall: float = 5.0, **limits: Any) -> Wire:
    return Wire(Limits(stall=stall, **limits), None, "", 5.0)


def asked(wire: Wire, place: Place, body: bytes = b"", out: memoryview | None = None) -> Answer:
    headers = {"Host": place.host, **({"Content-Length": str(len(body))} if body else {})}
    begin = None if out is None else lambda _status, _headers: Into(out)
    return wire.exchange(place, Sending("PUT" if body else "GET", "/b/k", headers, body), begin)


def test_a_connection_is_used_again_until_the_server_ends_it() -> None:
    server, mine = Server(echoing), wire()
    for _ in range(5):
        assert asked(mine, server.place).body == b"ok"
    assert server.connections == 1

    def once(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(OK)

    server = Server(once)
    for n in range(1, 4):
        assert asked(mine, server.place).body == b"ok"
        assert server.connections == n
        time.sleep(0.05)  # until its end has come


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\nx"])
def test_a_server_that_falls_silent_is_given_up(said: bytes) -> None:
    def silent(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(said)
        threading.Event().wait(30)

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        asked(wire(stall=0.3), Server(silent).place)
    assert time.monotonic() - start < 10


def test_a_server_that_trickles_is_given_up() -> None:
    def trickling(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n")
        for _ in range(3000):
            connection.sendall(b"x")
            time.sleep(0.01)

    out = memoryview(bytearray(500000))
    start = time.monotonic()
    assert asked(wire(stall=0.5), Server(trickling).place, out=out).count < 1000
    assert time.monotonic() - start < 10


def test_a_server_that_does_not_take_the_body_is_given_up() -> None:
    def deaf(connection: socket.socket, _number: int) -> None:
        connection.recv(10)
        threading.Event().wait(30)

    with pytest.raises(TimeoutError):
        asked(wire(stall=0.3), Server(deaf).place, b"x" * (32 << 20))


def test_a_refusal_that_comes_before_the_body_was_taken_is_heard() -> None:
    def refusing(connection: socket.socket, _number: int) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        threading.Event().wait(0.3)

    assert asked(wire(), Server(refusing).place, b"x" * (64 << 20)).status == 503


def test_bytes_up_and_down_are_paced_in_small_pieces() -> None:
    pace, out = Counted(), memoryview(bytearray(1 << 20))

    def giving(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + b"y" * (1 << 20))

    asked(wire(pace=pace), Server(echoing).place, b"x" * ((1 << 20) + 5))
    assert sum(pace.taken) - 2 == (1 << 20) + 5, "and the answer's two bytes"
    pace.taken.clear()
    assert asked(wire(pace=pace), Server(giving).place, out=out).count == 1 << 20
    assert sum(pace.taken) == 1 << 20
    assert max(pace.taken) <= pace.piece
    assert bytes(out) == b"y" * (1 << 20)


def test_what_breaks_off_is_given_as_far_as_it_came_and_an_answer_that_does_is_an_error() -> None:
    def breaking(connection: socket.socket, _number: int) -> None:
        request(connection)
        connection.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: 10\r\n\r\n1234")

    out = memoryview(bytearray(10))
    assert asked(wire(), Server(breaking).place, out=out).count == 4
    assert bytes(out[:4]) == b"1234"
    with pytest.raises(http.client.HTTPException):
        asked(wire(), Server(breaking).place)


def test_a_body_in_chunks_is_read_too() -> None:
    def chunked(connection: socket.socket, _number: int) -> None:
        while request(connection):
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    server, mine, out = Server(chunked), wire(), memoryview(bytearray(5))
    assert asked(mine, server.place).body == b"abcde"
    assert asked(mine, server.place, out=out).count == 5
    assert bytes(out) == b"abcde"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_tls_is_spoken_with_whom_the_bundle_names_and_nobody_else(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"],
        "-addext",
        "subjectAltName=DNS:localhost",
    ]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def spoken(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(connection, server_side=True) as tls:
            echoing(tls, number)

    server = Server(spoken)
    place = Place(is_tls=True, host=server.place.host.replace("127.0.0.1", "localhost"), root="/b/", region="r")
    trusting = Wire(Limits(), ssl.create_default_context(cafile=cert), "", 5.0)
    for _ in range(2):
        assert asked(trusting, place, b"x" * (1 << 20)).body == b"ok"
    assert server.connections == 1
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(Wire(Limits(), ssl.create_default_context(), "", 5.0), place)


def test_a_proxy_is_asked_for_the_whole_url_and_told_who_asks() -> None:
    heard: list[bytes] = []

    def proxy(connection: socket.socket, _number: int) -> None:
        heard.append(request(connection))
        connection.sendall(OK)

    address = Server(proxy).place.host
    place = Place(is_tls=False, host="s3.example:80", root="/b/", region="r")
    assert asked(Wire(Limits(), None, f"http://me:p%40ss@{address}", 5.0), place).body == b"ok"
    assert heard[0].startswith(b"GET http://s3.example:80/b/k HTTP/1.1")
    assert b"Proxy-Authorization: Basic " + b64encode(b"me:p@ss") in heard[0]


def test_a_child_process_does_not_use_its_parents_connections() -> None:
    server, mine = Server(echoing), wire()
    asked(mine, server.place)
    pid = os.fork()
    if not pid:
        os._exit(0 if asked(mine, server.place).body == b"ok" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert asked(mine, server.place).body == b"ok"
    assert server.connections == 2
