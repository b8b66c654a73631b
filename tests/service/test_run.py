"""The service as a real process: signals, faults, systemd, a second worker."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.service import run as module
from ckptsync.service.process_control import heartbeat
from ckptsync.service.process_status import Roles
from ckptsync.service.run import UntilGone
from ckptsync.service.tasks import Outcome, Task
from ckptsync.status.heartbeat import read, write
from ckptsync.stores.opening import create_store, open_store

SERVICE = """
import contextlib, os, sys, time
from pathlib import Path
from ckptsync.config.loading import read
from ckptsync.errors import StoreError
from ckptsync.service import run as service
from ckptsync.service.process_status import Roles
from ckptsync.service.tasks import Task

service.GRACE, service.CHECK_EVERY = float(os.environ.get("GRACE", "1")), 0.5

def look():
    print("looked", flush=True)
    {look}

def scan():
    print("scanned", file=sys.stderr)

@contextlib.contextmanager
def roles(config, node, store, fatal):
    found = Roles([Task("scan", 0.2, scan, fatal)], [Task("worker", 0.2, look, fatal)])
    found.watchdog.limit = float(os.environ.get("HUNG", "600"))
    if "JUMPS" in os.environ:  # after the first run of a task that APScheduler repeats
        head = Task("head", 3600.0, lambda: print("head", flush=True), fatal)
        found.periodic.append(head)
        real = service.wall_minus_monotonic
        service.wall_minus_monotonic = lambda: real() + (100.0 if head.finished else 0.0)
    yield found
    print("left", flush=True)

def load():
    text = Path(sys.argv[2]).read_text() if sys.argv[2:] else ""
    given = {{k: v for k, v in os.environ.items() if k.startswith("CKPTSYNC_")}}
    ours = {{"CKPTSYNC_ROLES": os.environ.get("ROLES", "worker"), **given}}
    where = "worker: {{runs: [/data]}}\\nstore: {{url: " + sys.argv[1] + "}}\\n"
    text = ("" if "store:" in text else where) + text
    return read("node: n0\\nroles: [worker]\\nlog: {{format: text}}\\n" + text, "c", ours)

sys.exit(service.run(load, begin=roles))
"""


@contextmanager
def service(
    store: Path | str, look: str = "pass", *more: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVICE.format(look=look), str(store), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def error(child: subprocess.Popen[str]) -> str:
    assert child.stderr
    return child.stderr.read()


def until_said(child: subprocess.Popen[str], words: str) -> str:
    assert child.stderr
    said = ""
    while words not in said:
        line = child.stderr.readline()
        assert line, said
        said += line
    return said


def has_stopped(path: Path) -> bool:
    """Whether the last heartbeat says so."""
    said = read(open_store(str(path)), "n0", ("worker",))
    assert said
    return said.stopped


def test_a_fault_ends_it_with_its_traceback_and_1(tmp_path: Path) -> None:
    with service(tmp_path / "s", "1 / 0") as child:
        assert child.wait(60) == 1
        told = error(child)
        assert "ZeroDivisionError" in told
        assert "Traceback" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_task_that_does_not_end_is_abandoned_within_seconds(
    tmp_path: Path, number: signal.Signals
) -> None:
    with service(tmp_path / "s", "time.sleep(60)") as child:
        assert line(child) == "looked"
        until_said(child, "phase=started")
        child.send_signal(number)
        assert child.wait(60) == 0
        assert "phase=abandoned tasks=worker" in error(child)
    assert has_stopped(tmp_path / "s"), "an operator who stops it is told of no node that is dead"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with service(tmp_path / "s", "time.sleep(600)", GRACE="600") as child:
        assert line(child) == "looked"
        while child.poll() is None:  # two that come at once are one
            child.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert child.returncode == 128 + signal.SIGTERM


@contextmanager
def notified(
    tmp_path: Path, look: str = "pass"
) -> Iterator[tuple[subprocess.Popen[str], Callable[[], bytes]]]:
    """A service, and what it tells systemd next."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(60)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        with service(tmp_path / "s", look, **told) as child:
            yield child, lambda: s.recv(999)


def test_after_a_jump_of_the_clock_tasks_that_are_due_by_the_wall_clock_run(tmp_path: Path) -> None:
    with service(tmp_path / "s", JUMPS="1") as child:
        assert "by=+100s" in until_said(child, "phase=clock-jumped")
        for _ in range(2):
            while line(child) != "head":
                assert child.poll() is None


def test_systemd_hears_of_start_progress_and_stop(tmp_path: Path) -> None:
    with notified(tmp_path) as (child, next_said):
        assert next_said().startswith(b"READY=1\n")
        while not (said := next_said()).startswith(b"WATCHDOG=1\nSTATUS=worker "):
            assert said.startswith(b"WATCHDOG=1\nSTATUS=opening the store")
        child.send_signal(signal.SIGTERM)
        while not (said := next_said()).startswith(b"STOPPING=1"):
            assert said.startswith(b"WATCHDOG=1")
        assert child.wait(60) == 0


def test_a_task_that_hangs_ends_the_process_with_the_stacks_of_its_threads_and_1(
    tmp_path: Path,
) -> None:
    with service(tmp_path / "s", "time.sleep(60)", HUNG="5", WATCHDOG_USEC="400000") as child:
        assert line(child) == "looked"
        assert child.wait(60) == 1
        said = error(child)
        assert 'phase=hung tasks=worker detail="no progress for 5 s"' in said
        assert "most recent call first" in said
        assert "in look" in said


def test_systemd_hears_of_life_while_it_waits_for_another_machines_heart(tmp_path: Path) -> None:
    create_store(str(tmp_path / "s"))
    write(
        open_store(str(tmp_path / "s")),
        replace(heartbeat("n0", ("worker",)), machine="another", period=1.0),
    )
    with notified(tmp_path) as (child, next_said):
        said: list[bytes] = []
        while not said or b"STATUS=worker" not in said[-1]:
            said.append(next_said())
        assert said[0] == b"READY=1\nSTATUS=opening the store"
        assert len(said) > 5
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def test_a_reload_with_what_it_could_not_begin_with_is_said_and_changes_nothing(
    tmp_path: Path,
) -> None:
    more = tmp_path / "more"
    more.write_text("")
    with service(tmp_path / "s", "pass", str(more)) as child:
        until_said(child, "phase=started")
        (tmp_path / "s" / "out").mkdir()
        more.write_text(f"store: {{url: {tmp_path}/s}}\nworker: {{runs: [{tmp_path}/s/out]}}\n")
        child.send_signal(signal.SIGHUP)
        said = until_said(child, "phase=not-reloaded")
        assert "inside the store" in said
        assert "phase=stopped" not in said
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


@contextmanager
def silent() -> Iterator[tuple[str, socket.socket]]:
    """A server that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(60)
        yield f"http://127.0.0.1:{server.getsockname()[1]}", server


def test_a_store_that_does_not_answer_keeps_nobody_from_stopping(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with (
        silent() as (url, server),
        service(
            "s3://bucket/x", CKPTSYNC_STORAGE_OPTIONS=f'{{"endpoint_url": "{url}"}}', **keys
        ) as child,
    ):
        until_said(child, "scanned")
        with server.accept()[0]:
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
        assert "phase=abandoned tasks=store" in error(child)


def test_looking_begins_before_the_store_is_there_and_sending_when_it_is(tmp_path: Path) -> None:
    with service(tmp_path / "s", ROLES="head") as child:  # no worker, which would make the store
        assert "phase=waiting" in until_said(child, "not a store")
        until_said(child, "scanned")
        create_store(str(tmp_path / "s"))
        assert line(child) == "looked"


def role(name: str, *outcomes: Outcome | StoreError) -> Task:
    script = list(outcomes)

    def work() -> Outcome:
        outcome = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    return Task(name, 1, work, print)


@pytest.fixture
def gone() -> UntilGone:
    child = subprocess.Popen(["true"])
    child.wait()
    return UntilGone(child.pid)


def test_a_service_ends_by_itself_only_after_a_process_that_it_was_told_of() -> None:
    roles = Roles([], [role("worker", Outcome())])
    assert not UntilGone(None).notice_end(roles)
    roles.tasks[0]()
    assert not UntilGone(os.getpid()).notice_end(roles)


def test_it_ends_after_a_run_that_began_when_the_process_was_gone_and_found_nothing_left(
    gone: UntilGone,
) -> None:
    worker = role("worker", Outcome(), Outcome(queue=("run/checkpoint-1",)), Outcome())
    roles = Roles([], [worker])
    worker()
    assert not gone.notice_end(roles), "what it left was not looked for yet"
    worker()
    assert not gone.notice_end(roles), "it is on its way"
    worker()
    assert gone.notice_end(roles)


def test_what_never_finishes_is_not_waited_for_for_ever_and_an_upload_under_way_is(
    gone: UntilGone, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = role("worker", Outcome(queue=("run/checkpoint-1",)))
    queue = role("upload-queue-1", Outcome())
    roles = Roles([], [plan, queue])
    assert not gone.notice_end(roles)
    for task in roles.all:
        task()
    queue.is_running = True
    assert not gone.notice_end(roles)
    monkeypatch.setattr(module, "FINISHES_WITHIN", -1.0)
    assert gone.notice_end(roles)
    monkeypatch.setattr(module, "FINISHES_WITHIN", 0.2)
    time.sleep(0.3)
    assert not gone.notice_end(roles), "it is being sent"
    plan.outcome = Outcome(queue=("run/checkpoint-1",), errors=("run/checkpoint-1: away",))
    time.sleep(0.3)
    assert gone.notice_end(roles), "the store never comes"
