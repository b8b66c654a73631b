"""Pages over real sockets."""

import contextlib
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptsync.errors import ConfigError
from ckptsync.status import http_server as page_module
from ckptsync.status.http_server import MANY, Page, PageListener
from tests.support.waiting import until

PAGES = {"/metrics": lambda: Page(200, b"m 1\n"), "/healthz": lambda: Page(503, b"no\n")}


@contextmanager
def listening(where: str = "127.0.0.1:0") -> Iterator[PageListener]:
    listener = PageListener(where, PAGES)
    try:
        yield listener
    finally:
        listener.close()


def got(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


def test_pages_are_served_and_others_are_named() -> None:
    with listening() as web:
        assert got(web.port, "/metrics") == (200, b"m 1\n")
        assert got(web.port, "/metrics?x=1") == (200, b"m 1\n")
        assert got(web.port, "/healthz") == (503, b"no\n")
        assert got(web.port, "/metrics", "HEAD") == (200, b"")
        assert got(web.port, "/other") == (404, b"there are /metrics and /healthz\n")
        assert got(web.port, "/metrics", "POST")[0] == 501


def test_nothing_is_said_of_what_serves_it() -> None:
    with (
        listening() as web,
        urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics", timeout=60) as answer,
    ):
        assert answer.headers["Server"].strip() == "ckptsync"


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_refused() -> None:
    with (
        listening() as web,
        pytest.raises(ConfigError, match=r"metrics.listen: 127.0.0.1:\d+: Address already in use"),
    ):
        PageListener(f"127.0.0.1:{web.port}", PAGES)
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        PageListener("192.0.2.1:0", PAGES)


def test_it_listens_on_ipv6_where_there_is_any() -> None:
    try:
        web = PageListener("[::1]:0", PAGES)
    except ConfigError:
        pytest.skip("no IPv6 here")
    web.close()


def test_a_closed_port_is_free_again() -> None:
    with listening() as web:
        port = web.port
    with listening(f"127.0.0.1:{port}"):
        assert got(port, "/metrics")[0] == 200


def test_many_who_say_nothing_do_not_keep_it_from_being_closed_nor_their_successors_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_module, "SLOW", 0.5)
    with listening() as web:
        silent = [socket.create_connection(("127.0.0.1", web.port)) for _ in range(MANY)]
        for one in silent:
            one.settimeout(60)
            assert one.recv(1) == b"", "who says nothing is cut off"
            one.close()
        assert got(web.port, "/metrics")[0] == 200


def test_of_more_than_many_at_once_the_oldest_gives_way() -> None:
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening())
        silent = [stack.enter_context(connected(web.port, b"")) for _ in range(MANY)]
        assert got(web.port, "/metrics")[0] == 200
        assert silent[0].recv(1) == b""
        silent[1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[1].recv(1)


def connected(port: int, head: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.settimeout(60)
    made.sendall(head)
    return made


def test_who_sends_a_head_byte_by_byte_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "SLOW", 1.0)
    with listening() as web, connected(web.port, b"GET /metrics HTTP/1.0\r\nX: ") as slow:
        slow.settimeout(0.05)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                slow.sendall(b"x")
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() < end


@pytest.mark.parametrize(
    "head", [b"", b"GET /metrics HTTP/1.0\r\nX: ", b"GET /large HTTP/1.0\r\n\r\n"]
)
def test_who_holds_all_locations_keeps_nobody_out(head: bytes) -> None:
    web = PageListener("127.0.0.1:0", {**PAGES, "/large": lambda: Page(200, bytes(32 << 20))})
    with contextlib.ExitStack() as stack:
        stack.callback(web.close)
        for _ in range(3 * MANY):
            stack.enter_context(connected(web.port, head))
            assert got(web.port, "/metrics") == (200, b"m 1\n")


def answering() -> int:
    """How many threads answer."""
    return sum("process_request_thread" in t.name for t in threading.enumerate())


def test_many_who_send_a_byte_a_second_keep_nobody_out_and_are_few_threads() -> None:
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening())
        slow = [stack.enter_context(connected(web.port, b"G")) for _ in range(4 * MANY)]
        for _ in range(3):
            for one in slow:
                with contextlib.suppress(ConnectionError):  # it gave way
                    one.sendall(b"E")
            began = time.monotonic()
            assert got(web.port, "/healthz") == (503, b"no\n")
            assert time.monotonic() - began < 5
            # the thread of one that gave way ends a moment later
            assert until(lambda: answering() <= MANY, 5)
            time.sleep(1)


def test_an_answer_that_nobody_takes_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "SLOW", 0.5)
    large = {"/large": lambda: Page(200, bytes(32 << 20))}
    with contextlib.ExitStack() as stack:
        web = PageListener("127.0.0.1:0", large)
        stack.callback(web.close)
        idle = stack.enter_context(connected(web.port, b"GET /large HTTP/1.0\r\n\r\n"))
        time.sleep(1.5)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while part := idle.recv(1 << 20):
                taken += len(part)
        assert taken < 32 << 20


@pytest.mark.parametrize(
    "head",
    [b"", b"GET /large", b"GET /large HTTP/1.0\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b"\n\n"],
)
def test_a_client_that_hangs_up_is_no_error(head: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    began, go_on = threading.Semaphore(0), threading.Event()

    def large() -> Page:
        began.release()
        go_on.wait(60)
        return Page(200, bytes(32 << 20))

    web = PageListener("127.0.0.1:0", {**PAGES, "/large": large})
    with contextlib.closing(web):
        with connected(web.port, head) as client:
            if head.endswith(b"/1.0\r\n\r\n") and head.startswith(b"GET"):
                assert began.acquire(timeout=60)
            reset = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        go_on.set()
        assert got(web.port, "/metrics")[0] == 200
        assert until(lambda: not answering())
    assert capfd.readouterr().err == ""


def test_a_head_that_is_too_long_has_no_answer() -> None:
    with listening() as web, contextlib.suppress(ConnectionError):
        many = b"".join(b"X-%d: %s\r\n" % (n, b"x" * 60_000) for n in range(5))
        with connected(web.port, b"GET /metrics HTTP/1.0\r\n" + many + b"\r\n") as talking:
            assert talking.recv(1) == b""
