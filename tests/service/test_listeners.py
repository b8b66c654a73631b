"""/metrics and /healthz of a process, over real sockets."""

import http.client
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from ckptsync.config.loading import read
from ckptsync.errors import ConfigError
from ckptsync.service.head_roles import Catalogues
from ckptsync.service.listeners import Listeners
from ckptsync.service.process_status import Roles
from ckptsync.service.tasks import HUNG, Outcome, Task, Watchdog
from ckptsync.status.alarms import Channel
from ckptsync.status.heartbeat import Disk
from ckptsync.stores.memory import MemoryStore
from tests.support.ports import free_port
from tests.support.status_examples import heart, job, location, shown, waiting

pytest.importorskip("prometheus_client")


class Head:
    """What a head's metrics are made of."""

    def __init__(self) -> None:
        now = time.time()
        entries = (
            job("verify", "a/b", done=3, total=9),
            job("verify", "a/c", state="failed"),
            *waiting("a/d", since=now - 1000, state="failed"),
            *waiting("a/e", since=now - 7),
        )
        self.jobs = SimpleNamespace(running=lambda: entries, waiting=lambda: ())
        self.running = self.jobs.running
        self.monitor = SimpleNamespace(
            overview=shown(heart(), locations=[location()]),
            senders=(SimpleNamespace(channel=Channel("webhook", 3, 1)),),
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


Make = Callable[[str], Listeners]


@pytest.fixture
def make(working: Roles) -> Make:
    def made(listen: str) -> Listeners:
        text = f"roles: [head]\nstore: {{url: /s}}\nmetrics: {{listen: '{listen}'}}\n"
        return Listeners(read(text, "c", {}), "n0", MemoryStore(), working)

    return made


@pytest.fixture
def exposing(make: Make) -> Iterator[Listeners]:
    with closing(make("127.0.0.1:0")) as made:
        yield made


def test_metrics_have_what_the_process_the_store_and_the_alerts_are(
    exposing: Listeners, working: Roles
) -> None:
    told = exposing.metrics()[1].decode().splitlines()
    for line in (
        'ckptsync_build_info{node="n0",roles="head",version="',
        'ckptsync_loop_runs_total{loop="head"} 1.0',
        'ckptsync_loop_runs_total{loop="heartbeat"} 0.0',
        "ckptsync_healthy 1.0",
        "ckptsync_queue_checkpoints 3.0",
        "ckptsync_queue_oldest_seconds 10",
        'ckptsync_running_done_bytes{checkpoint="b",kind="verify",run="a"} 3.0',
        'ckptsync_running_total_bytes{checkpoint="b",kind="verify",run="a"} 9.0',
        "ckptsync_sent_bytes_total 77.0",
        "ckptsync_errors 1.0",
        'ckptsync_disk_free_bytes{path="/out"} 1.0',
        'ckptsync_jobs{kind="verify"} 1.0',
        'ckptsync_alerts_failed_total{channel="webhook"} 1.0',
        'ckptsync_run_checkpoints{run="run",state="verified"} 1.0',
    ):
        assert any(said.startswith(line) for said in told), line
    working.head = None
    assert "ckptsync_run_checkpoints" not in exposing.metrics()[1].decode(), "a worker's own"


def test_it_is_well_unless_a_task_hangs_or_nobody_checks_for_that(
    exposing: Listeners, working: Roles
) -> None:
    assert exposing.health()[:2] == (200, b"ok\nheartbeat: idle\nhead: idle\n")
    now = [0.0]
    working.watchdog = Watchdog(HUNG, lambda: now[0])
    working.local[0].is_running = True
    for now[0] in (0.0, HUNG + 1):
        working.watchdog.check(working.all)
    status, body, _ = exposing.health()
    assert (status, body.splitlines()[0]) == (503, b"hangs: heartbeat")
    assert "ckptsync_healthy 0.0" in exposing.metrics()[1].decode()
    working.local[0].is_running = False
    working.watchdog.check(working.all)
    assert exposing.health()[0] == 200
    now[0] += 61
    assert exposing.health()[1].startswith(b"hangs: the watchdog has not run for 61 s")


def test_a_scrape_is_answered_while_a_look_hangs_in_its_store(
    exposing: Listeners, working: Roles
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
        assert 'ckptsync_loop_busy_seconds{loop="head"} ' in exposing.metrics()[1].decode()
        assert exposing.health()[1].startswith(b"ok\nheartbeat: idle\nhead: at work for ")
    finally:
        hangs.set()
        thread.join(60)


def test_it_listens_from_its_first_look_on_and_looks_again_change_nothing(make: Make) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
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
    monkeypatch: pytest.MonkeyPatch, exposing: Listeners
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ckptsync.status.metrics", raising=False)
    missing = r"metrics.listen: the package prometheus_client is missing"
    with pytest.raises(ConfigError, match=missing):
        exposing.listen()


CONFIG = """
roles: [{role}]
store: {{url: {url}}}
worker: {{runs: [/data/out]}}
web: {{listen: '{web}'{more}}}
"""


@pytest.mark.parametrize(
    ("web", "metrics", "more"),
    [("127.0.0.1:0", "127.0.0.1:0", ""), ("[::1]:0", "127.0.0.1:0", ", token: 0123456789abcdef")],
)
def test_a_head_shows_the_page_beside_its_metrics_or_on_the_same_address(
    web: str, metrics: str, more: str, working: Roles
) -> None:
    store = MemoryStore()
    text = CONFIG.format(role="head", url="/s", web=web, more=more)
    config = read(f"{text}metrics: {{listen: '{metrics}'}}\n", "c", {})
    working.head.catalogues = Catalogues(store)  # type: ignore[union-attr]
    with closing(Listeners(config, "n0", store, working)) as listeners:
        try:
            listeners.listen()
        except ConfigError:
            pytest.skip("no IPv6 here")
        listeners.listen()
        ports = {listeners.port(where) for where in (web, metrics)}
        assert len(ports) == len({web, metrics})
        status = {
            (where, path): ask(where, listeners.port(where), path)
            for where in (web, metrics)
            for path in ("/", "/metrics", "/healthz")
        }
    is_same = web == metrics
    assert [status[metrics, path] for path in ("/metrics", "/healthz")] == [200, 200]
    assert status[metrics, "/"] == (200 if is_same else 404)
    assert status[web, "/"] == (401 if more else 200)
    assert status[web, "/metrics"] == (200 if is_same else 404)


def ask(where: str, port: int, path: str) -> int:
    host = where.rpartition(":")[0].strip("[]")
    with closing(http.client.HTTPConnection(host, port, timeout=60)) as asking:
        asking.request("GET", path, headers={"Accept": "application/json"})
        return asking.getresponse().status


@pytest.mark.parametrize(
    ("role", "web", "more", "why"),
    [
        ("worker", "127.0.0.1:0", "", "a worker does not know the whole store"),
        ("head", "0.0.0.0:80", "", "web.token is not set"),
        ("head", "example.org:80", "", "web.token is not set"),
        ("head", "127.1.example.org:80", "", "web.token is not set"),
        ("head", "127.0.0.1:80", ", token: short", "not a token of 16"),
        ("head", "unix:socket", "", "not a socket's absolute path"),
    ],
)
def test_a_page_that_others_could_read_is_refused(role: str, web: str, more: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read(CONFIG.format(role=role, url="/s", web=web, more=more), "c", {})
    assert "short" not in str(caught.value)
