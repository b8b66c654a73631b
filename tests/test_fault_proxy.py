"""The proxy does what it says, and nothing else: else what is tested behind it is not tested."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    TRICKLE,
    UP,
    Answer,
    Break,
    Delay,
    Fault,
    Request,
    always,
    often,
    once,
)
from tests.support.seaweedfs import weed
from tests.support.waiting import until

BODY = b"0123456789" * 20_000


class Remembering(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Keeps)
        self.got: list[bytes] = []

    def handle_error(self, *_: object) -> None:
        """Connections break here on purpose."""


class _Keeps(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Remembering

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) == int(self.headers["Content-Length"]):
            self.server.got.append(body)
        self._say(b"ok")

    def do_GET(self) -> None:
        self._say(BODY)

    def do_HEAD(self) -> None:
        self._say(b"")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        if self.path == "/b/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            pieces = (body[:1], body[1:], b"") if self.command != "HEAD" else ()
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Remembering]:
    with Remembering() as one:
        threading.Thread(
            target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield one
        one.shutdown()


@pytest.fixture
def proxy(server: Remembering) -> Iterator[HttpProxy]:
    with closing(HttpProxy(("127.0.0.1", server.server_port))) as one:
        yield one


@pytest.fixture
def client(proxy: HttpProxy) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)) as one:
        yield one


def asked(
    client: http.client.HTTPConnection, method: str, path: str = "/b/k", body: bytes = b""
) -> tuple[int, bytes]:
    client.request(method, path, body or None)
    response = client.getresponse()
    return response.status, response.read()


def test_without_a_fault_everything_passes_over_one_connection(
    client: http.client.HTTPConnection, proxy: HttpProxy
) -> None:
    for path in ("/b/k", "/b/chunked"):
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
    server: Remembering,
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
    assert until(lambda: len(server.got) == (fault.side == DOWN))
    assert asked(client, "PUT", body=BODY) == (200, b"ok")


@pytest.mark.parametrize(
    ("how", "seen"),
    [(CUT, ConnectionResetError), (END, http.client.IncompleteRead), (STALL, TimeoutError)],
)
@pytest.mark.parametrize("after", [0, 1, 99_999])
def test_a_response_is_broken_after_so_many_bytes_under_its_full_length(
    client: http.client.HTTPConnection,
    proxy: HttpProxy,
    how: str,
    seen: type[Exception],
    after: int,
) -> None:
    proxy.plan = once("GetObject", Break(DOWN, how, after))
    client.request("GET", "/b/k")
    response = client.getresponse()
    assert response.length == len(BODY)
    assert client.sock
    client.sock.settimeout(1 if how == STALL else 60)
    with pytest.raises(seen):
        response.read()
    assert proxy.bytes["GetObject down"] == after


@pytest.mark.parametrize(
    "answer",
    [Answer(s, "SlowDown", is_done=done) for s in (200, 500, 503) for done in (False, True)],
)
def test_an_answer_is_an_error_of_s3_and_the_connection_goes_on(
    client: http.client.HTTPConnection, proxy: HttpProxy, server: Remembering, answer: Answer
) -> None:
    proxy.plan = once("PutObject", answer, nth=2)
    assert asked(client, "PUT", body=b"1") == (200, b"ok")
    got, body = asked(client, "PUT", body=b"2")
    assert (got, b"<Code>SlowDown</Code>" in body) == (answer.status, True)
    assert asked(client, "PUT", body=b"3") == (200, b"ok")
    assert server.got == ([b"1", b"2", b"3"] if answer.is_done else [b"1", b"3"])


@pytest.mark.parametrize(
    "fault", [Break(UP, TRICKLE, 5000), Break(DOWN, TRICKLE, 5000), Delay(0.1)]
)
def test_what_is_slow_comes_whole(
    client: http.client.HTTPConnection, proxy: HttpProxy, server: Remembering, fault: Fault
) -> None:
    proxy.plan = always("", fault)
    assert asked(client, "PUT", body=BODY[:9000]) == (200, b"ok")
    assert server.got == [BODY[:9000]]
    assert asked(client, "GET") == (200, BODY)


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


def test_chance_is_the_same_for_the_same_seed_and_leaves_gaps() -> None:
    requests = [Request(n, "GetObject") for n in range(200)]
    faults = [Delay(1), Delay(2)]
    drawn, again, other = ([*map(often(seed, 0.6, faults), requests)] for seed in (1, 1, 2))
    assert drawn == again != other
    runs = "".join(" x"[fault is not None] for fault in drawn).split()
    assert {len(run) for run in runs} == {1, 2}


def test_signatures_hold_and_requests_have_s3s_names() -> None:
    real = weed()
    with closing(HttpProxy(("127.0.0.1", real.port))) as proxy:
        bucket = real.bucket()
        client = real.client(endpoint=f"http://127.0.0.1:{proxy.port}")
        client.put_object(Bucket=bucket, Key="a", Body=BODY)
        assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == BODY
        assert client.head_object(Bucket=bucket, Key="a")["ContentLength"] == len(BODY)
        client.copy_object(Bucket=bucket, Key="b", CopySource={"Bucket": bucket, "Key": "a"})
        upload = {"Bucket": bucket, "Key": "c"}
        upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
        etag = client.upload_part(**upload, PartNumber=1, Body=BODY)["ETag"]
        client.list_parts(**upload)
        client.list_multipart_uploads(Bucket=bucket)
        client.complete_multipart_upload(
            **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]}
        )
        client.list_objects_v2(Bucket=bucket)
        client.delete_object(Bucket=bucket, Key="a")
    wanted = [
        "PutObject",
        "GetObject",
        "HeadObject",
        "CopyObject",
        "CreateMultipartUpload",
        "UploadPart",
        "ListParts",
    ]
    wanted += ["ListMultipartUploads", "CompleteMultipartUpload", "ListObjectsV2", "DeleteObject"]
    assert proxy.requests == dict.fromkeys(wanted, 1)
