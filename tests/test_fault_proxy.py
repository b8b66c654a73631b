"""The proxy does what it says, and nothing else: else what is tested behind it is not tested."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    UP,
    Answer,
    Break,
    once,
)
from tests.support.scripted_s3 import Asked, Say, Script, scripted
from tests.support.waiting import until

BODY = b"0123456789" * 20_000


def answered(request: Asked) -> Say:
    """What the server behind the proxy says; /b/chunked comes in chunks."""
    if request.method != "GET":
        return Say(200, b"ok" if request.method == "PUT" else b"")
    return Say(200, iter([BODY[:1], BODY[1:]]) if request.key == "chunked" else BODY)


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted(*[answered] * 9) as script:
        yield script


def received(script: Script) -> list[bytes]:
    """The bodies that the server has got whole."""
    whole = [a for a in script.asked if str(len(a.body)) == a.headers.get("content-length")]
    return [request.body for request in whole]


@pytest.fixture
def proxy(script: Script) -> Iterator[HttpProxy]:
    port = int(script.endpoint.rpartition(":")[2])
    with closing(HttpProxy(("127.0.0.1", port))) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: HttpProxy) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)) as client:
        yield client


def asked(
    client: http.client.HTTPConnection, method: str, path: str = "/bucket/k", body: bytes = b""
) -> tuple[int, bytes]:
    client.request(method, path, body or None)
    response = client.getresponse()
    return response.status, response.read()


def test_without_a_fault_everything_passes_over_one_connection(
    client: http.client.HTTPConnection, proxy: HttpProxy
) -> None:
    for path in ("/bucket/k", "/bucket/chunked"):
        assert asked(client, "GET", path) == (200, BODY)
        assert asked(client, "HEAD", path) == (200, b"")
        assert asked(client, "PUT", path, BODY) == (200, b"ok")
    assert proxy.requests == {"GetObject": 2, "HeadObject": 2, "PutObject": 2}
    assert proxy.bytes["PutObject up"] == proxy.bytes[UP] == 2 * len(BODY)
    assert proxy.bytes["GetObject down"] >= 2 * len(BODY)
    assert proxy.passed(2 * len(BODY), 0)
    assert not proxy.passed(2 * len(BODY) + 1, 0)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Break(UP, CUT, HEADLESS), ConnectionError),
        (Break(UP, CUT, 70_000), ConnectionError),
        (Break(UP, STALL, 70_000), TimeoutError),
        (Break(DOWN, CUT, HEADLESS), ConnectionResetError),
        (Break(DOWN, END, HEADLESS), http.client.RemoteDisconnected),
        (Break(DOWN, STALL, HEADLESS), TimeoutError),
    ],
)
def test_a_break_is_what_it_says_and_tells_whether_the_server_has_it(
    client: http.client.HTTPConnection,
    proxy: HttpProxy,
    script: Script,
    fault: Break,
    seen: type[Exception],
) -> None:
    proxy.plan = once("PutObject", fault)
    client.timeout = 1 if fault.how == STALL else 60
    with pytest.raises(seen):
        asked(client, "PUT", body=BODY)
    client.close()
    client.timeout = 60
    assert proxy.faults == [("PutObject", fault)]
    assert until(lambda: len(received(script)) == (fault.side == DOWN))
    assert asked(client, "PUT", body=BODY) == (200, b"ok")


@pytest.mark.parametrize(
    ("how", "seen"),
    [(CUT, ConnectionResetError), (END, http.client.IncompleteRead), (STALL, TimeoutError)],
)
def test_a_response_is_broken_after_so_many_bytes_under_its_full_length(
    client: http.client.HTTPConnection, proxy: HttpProxy, how: str, seen: type[Exception]
) -> None:
    proxy.plan = once("GetObject", Break(DOWN, how, 99_999))
    client.request("GET", "/bucket/k")
    response = client.getresponse()
    assert response.length == len(BODY)
    assert client.sock
    client.sock.settimeout(1 if how == STALL else 60)
    with pytest.raises(seen):
        response.read()
    assert proxy.bytes["GetObject down"] == 99_999


@pytest.mark.parametrize("answer", [Answer(200, "SlowDown"), Answer(503, "SlowDown", is_done=True)])
def test_an_answer_is_an_error_of_s3_and_the_connection_goes_on(
    client: http.client.HTTPConnection, proxy: HttpProxy, script: Script, answer: Answer
) -> None:
    proxy.plan = once("PutObject", answer, nth=2)
    assert asked(client, "PUT", body=b"1") == (200, b"ok")
    got, body = asked(client, "PUT", body=b"2")
    assert (got, b"<Code>SlowDown</Code>" in body) == (answer.status, True)
    assert asked(client, "PUT", body=b"3") == (200, b"ok")
    assert received(script) == ([b"1", b"2", b"3"] if answer.is_done else [b"1", b"3"])


@pytest.mark.parametrize(
    ("how", "seen"), [(CUT, ConnectionResetError), (END, None), (STALL, TimeoutError)]
)
@pytest.mark.parametrize("side", [UP, DOWN])
def test_a_connection_is_broken_after_so_many_bytes(
    how: str, seen: type[Exception] | None, side: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(TcpProxy(server.getsockname())) as proxy,
    ):
        proxy.plan = once("connection", Break(side, how, 10))
        ends = [socket.create_connection(("127.0.0.1", proxy.port), 5), server.accept()[0]]
        source, sink = ends if side == UP else ends[::-1]
        sink.settimeout(1 if how == STALL else 60)
        source.sendall(BODY[:11])
        got = b""
        with pytest.raises(seen) if seen else closing(source):
            while piece := sink.recv(100):
                got += piece
        assert got == BODY[:10] or (how == CUT and BODY[:10].startswith(got)), (
            "a reset may overtake what was sent"
        )
        assert proxy.bytes[side] == 10
        for end in ends:
            end.close()
