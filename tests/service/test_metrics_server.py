"""/metrics and /healthz of a process, over real sockets."""

import contextlib
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from ckptsync.config.loading import read
from ckptsync.errors import ConfigError
from ckptsync.service import metrics_server as module
from ckptsync.service.metrics_server import MANY, Metrics, Page, PageListener
from ckptsync.service.process_status import Roles
from ckptsync.service.tasks import HUNG, Outcome, Task, Watchdog
from ckptsync.status.alarms import Channel
from ckptsync.status.heartbeat import Disk
from tests.support.status_examples import heart, job, location, shown
from tests.support.waiting import until

pytest.importorskip("prometheus_client")


class Head:
    """What a head's metrics are made of."""

    def __init__(self) -> None:
        self.jobs = SimpleNamespace(
            running=lambda: (job("verify", "a/b", done=3, total=9),), waiting=lambda: ()
        )
        self.monitor = SimpleNamespace(
            seen=shown(heart(), locations=[location()]),
            senders=(SimpleNamespace(channel=Channel("slack-1", 3, 1)),),
        )


@pytest.fixture
def working() -> Roles:
    done = Outcome(queue=("a/b",), errors=("odd",))
    role = Task("head", 1, lambda: done, print)
    role()
    working = Roles([Task("heartbeat", 30, lambda: None, print)])
    working.periodic.append(role)
    working.head = Head()  # type: ignore[assignment]
    working.disks = (Disk("/out", 1, 2, 3),)
    working.sent_bytes = lambda: 77
    return working


Make = Callable[[str], Metrics]


@pytest.fixture
def make(working: Roles) -> Make:
    def made(listen: str) -> Metrics:
        text = f"roles: [head]\nstore: {{url: /s}}\nmetrics: {{listen: '{listen}'}}\n"
        return Metrics(read(text, "c", {}), "n0", working)

    return made


@pytest.fixture
def exposing(make: Make) -> Iterator[Metrics]:
    with closing(make("127.0.0.1:0")) as made:
        yield made


def test_metrics_have_what_the_process_the_store_and_the_alerts_are(exposing: Metrics) -> None:
    told = exposing.metrics().body.decode().splitlines()
    for line in (
        'ckptsync_build_info{node="n0",roles="head",version="',
        'ckptsync_loop_runs_total{loop="head"} 1.0',
        'ckptsync_loop_runs_total{loop="heartbeat"} 0.0',
        "ckptsync_healthy 1.0",
        "ckptsync_queue_checkpoints 1.0",
        "ckptsync_queue_oldest_seconds 0.0",
        'ckptsync_running_done_bytes{checkpoint="b",kind="verify",run="a"} 3.0',
        'ckptsync_running_total_bytes{checkpoint="b",kind="verify",run="a"} 9.0',
        "ckptsync_sent_bytes_total 77.0",
        "ckptsync_errors 1.0",
        'ckptsync_disk_free_bytes{path="/out"} 1.0',
        'ckptsync_jobs{kind="verify"} 1.0',
        'ckptsync_alerts_failed_total{channel="slack-1"} 1.0',
        'ckptsync_run_checkpoints{run="run",state="verified"} 1.0',
    ):
        assert any(said.startswith(line) for said in told), line


def test_it_is_well_unless_a_task_hangs_or_nobody_checks_for_that(
    exposing: Metrics, working: Roles
) -> None:
    page = exposing.health()
    assert (page.status, page.body) == (200, b"ok\nheartbeat: idle\nhead: idle\n")
    now = [0.0]
    working.watchdog = Watchdog(HUNG, lambda: now[0])
    working.local[0].is_running = True
    for now[0] in (0.0, HUNG + 1):
        working.watchdog.check(working.all)
    page = exposing.health()
    assert (page.status, page.body.splitlines()[0]) == (503, b"hangs: heartbeat")
    assert "ckptsync_healthy 0.0" in exposing.metrics().body.decode()
    working.local[0].is_running = False
    working.watchdog.check(working.all)
    assert exposing.health().status == 200
    now[0] += 61
    assert exposing.health().body.startswith(b"hangs: the watchdog has not run for 61 s")


def test_a_scrape_is_answered_while_a_look_hangs_in_its_store(
    exposing: Metrics, working: Roles
) -> None:
    hangs, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        hangs.wait(60)

    working.periodic[0]._work = hang
    thread = threading.Thread(target=working.periodic[0])
    thread.start()
    began.wait(60)
    try:
        assert 'ckptsync_loop_busy_seconds{loop="head"} ' in exposing.metrics().body.decode()
        assert exposing.health().body.startswith(b"ok\nheartbeat: idle\nhead: at work for 0 s")
    finally:
        hangs.set()
        thread.join(60)


def test_it_listens_from_its_first_look_on_and_looks_again_change_nothing(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        exposing = make(f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="in use"):
            exposing.listen()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60)
    exposing.listen()
    exposing.listen()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as page:
        assert page.read().startswith(b"ok\n")
    exposing.close()
    exposing.close()


def test_without_the_package_it_says_what_is_missing_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, exposing: Metrics
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ckptsync.status.metrics", raising=False)
    missing = r"metrics.listen: the package prometheus_client is missing"
    with pytest.raises(ConfigError, match=missing):
        exposing.listen()


LARGE = Page(200, bytes(32 << 20))
PAGES = {"/metrics": lambda: Page(200, b"m 1\n"), "/healthz": lambda: Page(503, b"no\n")}


@contextmanager
def listening(
    where: str = "127.0.0.1:0", large: Callable[[], Page] = lambda: LARGE
) -> Iterator[PageListener]:
    with closing(PageListener(where, {**PAGES, "/large": large})) as listener:
        yield listener


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
        assert got(web.port, "/other") == (404, b"there are /metrics and /healthz and /large\n")
        assert got(web.port, "/metrics", "POST")[0] == 501

        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics", timeout=60) as answer:
            assert answer.headers["Server"].strip() == "ckptsync"


def test_a_port_that_is_taken_is_refused_until_it_is_free_and_so_is_a_host_elsewhere() -> None:
    used = r"metrics.listen: 127.0.0.1:\d+: Address already in use"
    with listening() as web, pytest.raises(ConfigError, match=used):
        PageListener(f"127.0.0.1:{web.port}", PAGES)
    with listening(f"127.0.0.1:{web.port}"):
        assert got(web.port, "/metrics")[0] == 200
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        PageListener("192.0.2.1:0", PAGES)


def test_it_listens_on_ipv6_where_there_is_any() -> None:
    try:
        web = PageListener("[::1]:0", PAGES)
    except ConfigError:
        pytest.skip("no IPv6 here")
    web.close()


def test_many_who_say_nothing_do_not_keep_it_from_being_closed_nor_their_successors_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOW", 0.5)
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
    monkeypatch.setattr(module, "SLOW", 1.0)
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
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening())
        for _ in range(3 * MANY):
            stack.enter_context(connected(web.port, head))
            assert got(web.port, "/metrics") == (200, b"m 1\n")


@pytest.fixture
def answering() -> Callable[[], int]:
    """How many threads answer; other tests' servers in this process have theirs."""
    others = set(threading.enumerate())
    return lambda: sum(
        "process_request_thread" in t.name for t in set(threading.enumerate()) - others
    )


def test_many_who_send_a_byte_a_second_keep_nobody_out_and_are_few_threads(
    answering: Callable[[], int],
) -> None:
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
    monkeypatch.setattr(module, "SLOW", 0.5)
    with listening() as web, connected(web.port, b"GET /large HTTP/1.0\r\n\r\n") as idle:
        time.sleep(1.5)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while part := idle.recv(1 << 20):
                taken += len(part)
        assert taken < 32 << 20


def test_pages_that_hang_are_few_and_are_not_cut_off_and_healthz_answers_beside_them() -> None:
    began, go_on = threading.Semaphore(0), threading.Event()

    def large() -> Page:
        began.release()
        assert go_on.wait(60)
        return LARGE

    with contextlib.ExitStack() as stack:
        web = stack.enter_context(listening(large=large))
        stack.callback(go_on.set)
        head = b"GET /large HTTP/1.0\r\n\r\n"
        waiting = []
        for _ in range(MANY):
            waiting.append(stack.enter_context(connected(web.port, head)))
            assert began.acquire(timeout=60)
        for _ in range(2 * MANY):
            stack.enter_context(connected(web.port, b"G"))
        assert got(web.port, "/large")[0] == 503
        assert got(web.port, "/healthz") == (503, b"no\n")
        go_on.set()
        assert all(one.recv(12) == b"HTTP/1.0 200" for one in waiting)


@pytest.mark.parametrize(
    "head",
    [b"", b"GET /large", b"GET /large HTTP/1.0\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b"\n\n"],
)
def test_a_client_that_hangs_up_is_no_error(
    head: bytes, answering: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    began, go_on = threading.Semaphore(0), threading.Event()

    def large() -> Page:
        began.release()
        go_on.wait(60)
        return LARGE

    with listening(large=large) as web:
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
