"""The one HTTP server, over real sockets: slow clients, silent ones, and those that hang up."""

import contextlib
import http.client
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.web import server as module
from ckptsync.web.app import Text, make_app
from ckptsync.web.server import MANY, HttpServer
from tests.support.ports import free_port
from tests.support.waiting import until

LARGE = (200, bytes(32 << 20), "text/plain")
PAGES: dict[str, Callable[[], Text]] = {
    "/metrics": lambda: (200, b"m 1\n", "text/plain"),
    "/healthz": lambda: (503, b"no\n", "text/plain"),
}


class Hanging:
    """A page that is answered once `go_on` is set; `began` counts who asked for it."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Event()

    def __call__(self) -> Text:
        self.began.release()
        assert self.go_on.wait(60)
        return LARGE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut nobody off for being slow, as a busy machine is, but where a test is about that."""
    monkeypatch.setattr(module, "SLOW", 600.0)


@contextmanager
def listening(
    where: str = "127.0.0.1:0", large: Callable[[], Text] = lambda: LARGE
) -> Iterator[HttpServer]:
    app = make_app({**PAGES, "/large": large})
    with closing(HttpServer(where, app, "metrics.listen")) as server:
        yield server


def answer(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as asking:
        asking.request(method, path)
        response = asking.getresponse()
        return response.status, response.read()


@contextmanager
def connected(port: int, head: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.settimeout(60)
        made.sendall(head)
        yield made


def is_cut_off(client: socket.socket) -> bool:
    """Return whether the server closed a connection without an answer, within a minute."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_pages_are_served_and_others_are_named() -> None:
    with listening() as web:
        assert answer(web.port, "/metrics") == (200, b"m 1\n")
        assert answer(web.port, "/metrics?x=1") == (200, b"m 1\n")
        assert answer(web.port, "/healthz") == (503, b"no\n")
        assert answer(web.port, "/metrics", "HEAD") == (200, b"")
        assert answer(web.port, "/other") == (404, b"there are /metrics and /healthz and /large\n")
        assert answer(web.port, "/metrics", "POST")[0] == 405
        with closing(http.client.HTTPConnection("127.0.0.1", web.port, timeout=60)) as asking:
            for _ in range(3):  # one connection, as Prometheus has
                asking.request("GET", "/metrics")
                response = asking.getresponse()
                assert response.read() == b"m 1\n"
            assert response.headers["Server"] == "ckptsync"
            assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_a_port_that_is_taken_is_refused_until_it_is_free_and_so_is_a_host_elsewhere() -> None:
    used = r"metrics.listen: 127.0.0.1:\d+: Address already in use"
    where = f"127.0.0.1:{free_port()}"
    with listening(where) as web, pytest.raises(ConfigError, match=used):
        HttpServer(f"127.0.0.1:{web.port}", make_app(PAGES), "metrics.listen")
    with listening(where):
        assert answer(web.port, "/metrics")[0] == 200
    with pytest.raises(ConfigError, match=r"web\.listen"):
        HttpServer("192.0.2.1:0", make_app(PAGES), "web.listen")


def test_a_unix_socket_is_this_user_s_alone_and_one_left_behind_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("web")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(path))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        with pytest.raises(ConfigError, match="in use"):
            HttpServer(f"unix:{path}", make_app(PAGES), "web.listen")
    assert not path.exists()


def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW", 0.5)
    with listening() as web, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(web.port, b"")) for _ in range(MANY)]
        assert all(map(is_cut_off, silent))
        monkeypatch.setattr(module, "SLOW", 600.0)
        assert answer(web.port, "/metrics")[0] == 200


def test_of_more_than_many_silent_ones_the_oldest_gives_way() -> None:
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening())
        silent = [stack.enter_context(connected(web.port, b"")) for _ in range(MANY + 1)]
        assert is_cut_off(silent[0])
        assert answer(web.port, "/metrics")[0] == 200
        silent[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_many_that_ask_at_once_are_answered() -> None:
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening())
        blocked = threading.Event()
        web._loop.call_soon_threadsafe(blocked.wait, 60)
        head = b"GET /healthz HTTP/1.0\r\n\r\n"
        asking = [stack.enter_context(connected(web.port, head)) for _ in range(6 * MANY)]
        blocked.set()
        assert all(client.recv(12) == b"HTTP/1.1 503" for client in asking)


def test_who_sends_a_head_byte_by_byte_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW", 1.0)
    with listening() as web, connected(web.port, b"GET /metrics HTTP/1.0\r\nX: ") as slow:
        slow.settimeout(0.05)

        def is_over() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        assert until(is_over, 60, 0)


@pytest.mark.parametrize(
    "head", [b"", b"GET /metrics HTTP/1.0\r\nX: ", b"GET /large HTTP/1.0\r\n\r\n"]
)
def test_who_holds_all_connections_keeps_nobody_out(head: bytes) -> None:
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening(large=lambda: (200, bytes(4 << 20), "text/plain")))
        for _ in range(3 * MANY):
            stack.enter_context(connected(web.port, head))
            assert answer(web.port, "/metrics") == (200, b"m 1\n")


@pytest.mark.parametrize("more", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_an_answer_that_nobody_takes_is_given_up_in_time(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def large() -> Text:
        monkeypatch.setattr(module, "SLOW", 0.5)  # now that its head has come
        began.set()
        return LARGE

    head = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    with listening(large=large) as web, connected(web.port, head) as idle:
        assert began.wait(60)
        end = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end and web.connections():
                time.sleep(0.2)
                idle.sendall(more)  # to send is not to take
        assert time.monotonic() < end
        size = 0
        with contextlib.suppress(ConnectionError):
            while part := idle.recv(1 << 20):
                size += len(part)
        assert size < len(LARGE[1])


def test_pages_that_hang_are_few_and_are_not_cut_off_and_healthz_answers_beside_them() -> None:
    with contextlib.ExitStack() as stack:
        large = Hanging()
        web = stack.enter_context(listening(large=large))
        stack.callback(large.go_on.set)
        head = b"GET /large HTTP/1.0\r\n\r\n"
        waiting = []
        for _ in range(MANY):
            waiting.append(stack.enter_context(connected(web.port, head)))
            assert large.began.acquire(timeout=60)
        for _ in range(2 * MANY):
            stack.enter_context(connected(web.port, b"G"))
        assert answer(web.port, "/large")[0] == 503
        assert answer(web.port, "/healthz") == (503, b"no\n")
        large.go_on.set()
        assert all(client.recv(12) == b"HTTP/1.1 200" for client in waiting)


@pytest.mark.parametrize(
    "head", [b"GET /large", b"GET /large HTTP/1.0\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b"\0"]
)
def test_a_client_that_hangs_up_is_no_error(
    head: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    large = Hanging()
    with listening(large=large) as web:
        with connected(web.port, head) as client:
            if head.endswith(b"/1.0\r\n\r\n") and head.startswith(b"GET"):
                assert large.began.acquire(timeout=60)
            reset = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        large.go_on.set()
        assert answer(web.port, "/metrics")[0] == 200
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_page_that_cannot_be_made_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def large() -> Text:
        raise ZeroDivisionError("a bug")

    with listening(large=large) as web:
        assert answer(web.port, "/large")[0] == 500
        assert answer(web.port, "/metrics")[0] == 200
    assert "ZeroDivisionError: a bug" in caplog.text
