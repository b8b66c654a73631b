"""Answers as servers and proxies frame them, well and badly."""

from __future__ import annotations

import http.client
import io

import pytest

from ckptsync.stores.s3.answers import Body, Cut, head


def answer(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(data))


def read(data: bytes, method: str = "GET", room: int = 3) -> tuple[bytes, Body]:
    file = answer(data)
    body = Body(file, head(file), method)
    out, found = memoryview(bytearray(room)), b""
    while count := body.read_into(out):
        found += bytes(out[:count])
    return found, body


def test_headers_are_found_in_any_case_and_the_first_of_a_name_counts() -> None:
    found = head(answer(b'HTTP/1.1 200 OK\r\nETag: "a"\r\nX-Two: 1\r\nx-two: 2\r\nX-Long: a\r\n  b\r\n\r\n')).headers
    assert found["etag"] == found.get("ETAG") == '"a"'
    assert (found["X-Two"], found["X-Long"]) == ("1", "a b")
    assert "x-TWO" in found
    assert found.get("absent", "") == ""
    assert dict(found) == {"etag": '"a"', "x-two": "1", "x-long": "a b"}


def test_an_answer_that_is_none_yet_is_passed_over() -> None:
    assert head(answer(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Wait\r\nA: b\r\n\r\nHTTP/1.1 204\r\n\r\n")).status == 204
    with pytest.raises(http.client.BadStatusLine):
        head(answer(b"HTTP/1.1 100 Continue\r\n\r\n" * 20))


@pytest.mark.parametrize(
    ("said", "is_last"),
    [
        (b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n", False),
    ],
)
def test_whether_the_connection_ends_with_the_body(said: bytes, is_last: bool) -> None:  # noqa: FBT001
    assert head(answer(said + b"\r\n")).is_last is is_last


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : space\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n",
        b"HTTP/1.1 200 OK\r\nA",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_refused(said: bytes) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionResetError)):
        head(answer(said)).headers["end of the head"]


def test_a_body_ends_where_its_length_says() -> None:
    found, body = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12345HTTP/1.1")
    assert (found, body.left, body.is_over, body.ends_connection) == (b"12345", 0, True, False)


def test_a_body_that_broke_off_says_what_is_missing() -> None:
    found, body = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12")
    assert (found, body.left) == (b"12", 3)


@pytest.mark.parametrize("data", [b"HTTP/1.1 204 No\r\n\r\nrest", b"HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\nrest"])
def test_answers_without_bodies_have_none(data: bytes) -> None:
    assert read(data)[0] == b""
    assert read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nrest", "HEAD")[0] == b""


def test_without_a_length_the_connection_is_the_body() -> None:
    found, body = read(b"HTTP/1.1 200 OK\r\n\r\n12345")
    assert (found, body.is_over, body.ends_connection) == (b"12345", True, True)


def test_chunks_are_put_together_and_what_follows_is_left() -> None:
    said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
    found, body = read(said + b"HTTP")
    assert (found, body.is_over, body.ends_connection) == (b"abcd0123456789", True, False)


@pytest.mark.parametrize("chunks", [b"4\r\nabc", b"zz\r\nabc", b"-1\r\nabc", b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc\r\n", b""])
def test_chunks_that_are_none_are_refused(chunks: bytes) -> None:
    with pytest.raises(http.client.HTTPException):
        read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"5, 5", b"9" * 30])
def test_a_length_that_is_none_is_refused(length: bytes) -> None:
    with pytest.raises(http.client.HTTPException):
        read(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n12345")


def test_a_head_that_broke_off_is_told_from_a_connection_that_was_closed() -> None:
    with pytest.raises(Cut):
        head(answer(b"HTTP/1.1 200"))
    with pytest.raises(http.client.RemoteDisconnected):
        head(answer(b""))
