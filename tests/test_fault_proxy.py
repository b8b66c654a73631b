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
from tests.support.scripted_s3 import Asked, Say, Script, scripted
from tests.support.seaweedfs import weed
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
@pytest.mark.parametrize("after", [0, 99_999])
def test_a_response_is_broken_after_so_many_bytes_under_its_full_length(
    client: http.client.HTTPConnection,
    proxy: HttpProxy,
    how: str,
    seen: type[Exception],
    after: int,
) -> None:
    proxy.plan = once("GetObject", Break(DOWN, how, after))
    client.request("GET", "/bucket/k")
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
    client: http.client.HTTPConnection, proxy: HttpProxy, script: Script, answer: Answer
) -> None:
    proxy.plan = once("PutObject", answer, nth=2)
    assert asked(client, "PUT", body=b"1") == (200, b"ok")
    got, body = asked(client, "PUT", body=b"2")
    assert (got, b"<Code>SlowDown</Code>" in body) == (answer.status, True)
    assert asked(client, "PUT", body=b"3") == (200, b"ok")
    assert received(script) == ([b"1", b"2", b"3"] if answer.is_done else [b"1", b"3"])


@pytest.mark.parametrize(
    "fault", [Break(UP, TRICKLE, 5000), Break(DOWN, TRICKLE, 5000), Delay(0.1)]
)
def test_what_is_slow_comes_whole(
    client: http.client.HTTPConnection, proxy: HttpProxy, script: Script, fault: Fault
) -> None:
    proxy.plan = always("", fault)
    assert asked(client, "PUT", body=BODY[:9000]) == (200, b"ok")
    assert received(script) == [BODY[:9000]]
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
    of_objects = {f"{verb}Object" for verb in ("Put", "Get", "Head", "Copy", "Delete")}
    of_parts = {f"{verb}MultipartUpload" for verb in ("Create", "Complete")}
    lists = {"ListParts", "ListMultipartUploads", "ListObjectsV2"}
    assert proxy.requests == dict.fromkeys(of_objects | of_parts | lists | {"UploadPart"}, 1)
