"""The service as a real process: signals, faults, systemd, a second worker."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckptsync.fleet.heartbeat import read, write
from ckptsync.service.process import heartbeat
from ckptsync.stores.opening import create_store, open_store

SERVICE = """
import contextlib, os, sys, time
from pathlib import Path
from ckptsync.config.loading import read
from ckptsync.service.run import run
from ckptsync.service.periodic import Outcome
from ckptsync.service.periodic import Periodic
from ckptsync.service.roles import Roles
from ckptsync.errors import StoreError

def look():
    print("looked", flush=True)
    {look}
    return Outcome()

@contextlib.contextmanager
def roles(config, node, store, fatal):
    glance = Periodic("look", 0.2, lambda: print("glanced", file=sys.stderr) or Outcome(), fatal)
    yield Roles([Periodic("worker", 0.2, look, fatal)], looks=[glance])
    print("left", flush=True)

def load():
    text = Path(sys.argv[2]).read_text() if sys.argv[2:] else ""
    ours = {{"CKPTSYNC_ROLES": os.environ.get("ROLES", "worker"), **{{k: v for k, v in os.environ.items() if k.startswith("CKPTSYNC_")}}}}
    where = "" if "store:" in text else "worker: {{runs: [/data]}}\\nstore: {{url: " + sys.argv[1] + "}}\\n"
    return read("node: n0\\nroles: [worker]\\nlog: {{format: text}}\\n" + where + text, "c", ours)

sys.exit(run(load, begin=roles))
"""


@contextmanager
def service(store: Path | str, look: str = "pass", *more: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
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


def test_a_signal_ends_it_cleanly_and_its_last_word_is_in_the_store(tmp_path: Path) -> None:
    with service(tmp_path / "s") as child:
        assert [line(child), line(child)] == ["looked", "looked"]
        store = open_store(str(tmp_path / "s"))
        deadline = time.monotonic() + 5
        while not (alive := read(store, "n0", ("worker",))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive
        assert not alive.stopped
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        said = read(store, "n0", ("worker",))
        assert said
        assert said.stopped
        assert "phase=stopped node=n0 exit_code=0" in error(child)


def test_a_fault_ends_it_with_its_traceback_and_1(tmp_path: Path) -> None:
    with service(tmp_path / "s", "1 / 0") as child:
        assert child.wait(60) == 1
        told = error(child)
        assert "ZeroDivisionError" in told
        assert "Traceback" in told


def test_an_operators_error_does_not_end_it(tmp_path: Path) -> None:
    with service(tmp_path / "s", "raise StoreError('away')") as child:
        assert [line(child) for _ in range(4)] == ["looked"] * 4
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        assert error(child).count("error=away") == 1


def test_a_tick_that_does_not_end_is_abandoned_within_seconds(tmp_path: Path) -> None:
    with service(tmp_path / "s", "time.sleep(60)") as child:
        assert line(child) == "looked"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert "phase=abandoned ticks=worker" in error(child)
    said = read(open_store(str(tmp_path / "s")), "n0", ("worker",))
    assert said
    assert said.stopped, "an operator who stops it is told of no node that is dead"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with service(tmp_path / "s", "time.sleep(60)") as child:
        assert line(child) == "looked"
        child.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM


def test_a_second_worker_of_one_id_stops_with_2_and_the_first_goes_on(tmp_path: Path) -> None:
    create_store(str(tmp_path / "s"))
    write(open_store(str(tmp_path / "s")), heartbeat("n0", ("worker",)))  # this very process: it lives
    with service(tmp_path / "s") as child:
        assert child.wait(60) == 1  # run() raised ConfigError: the command line makes 2 of it
        assert "another live worker has this id" in error(child)
    still = read(open_store(str(tmp_path / "s")), "n0", ("worker",))
    assert still
    assert still.pid == os.getpid()


def test_systemd_hears_of_start_progress_and_stop(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(60)
        with service(tmp_path / "s", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000") as child:
            assert s.recv(999).startswith(b"READY=1\n")
            assert s.recv(999).startswith(b"WATCHDOG=1\nSTATUS=worker ")
            child.send_signal(signal.SIGTERM)
            while not (told := s.recv(999)).startswith(b"STOPPING=1"):
                assert told.startswith(b"WATCHDOG=1")
            assert child.wait(60) == 0


def test_a_hung_tick_does_not_feed_the_watchdog(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(60)
        with service(tmp_path / "s", "time.sleep(60)", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000") as child:
            assert line(child) == "looked"
            time.sleep(1)
            told = [s.recv(999) for _ in range(5)]
            assert [t for t in told[2:] if t.startswith(b"WATCHDOG=1")] == []
            child.send_signal(signal.SIGKILL)


def test_systemd_hears_of_life_while_it_waits_for_another_machines_heart(tmp_path: Path) -> None:
    create_store(str(tmp_path / "s"))
    write(open_store(str(tmp_path / "s")), replace(heartbeat("n0", ("worker",)), machine="another", period=0.4))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(60)
        with service(tmp_path / "s", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="6000000") as child:
            told: list[bytes] = []
            while not told or b"worker" not in told[-1]:
                told.append(s.recv(999))
            assert told[:2] == [b"READY=1\nSTATUS=opening the store", b"WATCHDOG=1"]
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0


def until_said(child: subprocess.Popen[str], words: str) -> str:
    assert child.stderr
    said = ""
    while words not in said:
        line = child.stderr.readline()
        assert line, said
        said += line
    return said


def test_sighup_ends_it_so_that_the_next_start_reads_the_configuration_as_it_is_now(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text("")
    with service(tmp_path / "s", "pass", str(more)) as child:
        until_said(child, "phase=started")
        more.write_text("limits: {threads: 7}\n")
        child.send_signal(signal.SIGHUP)
        said = until_said(child, "phase=stopped node=n0 exit_code=0")
        assert "phase=reloading" in said
        assert child.wait(60) == 0
        told = read(open_store(str(tmp_path / "s")), "n0", ("worker",))
        assert told
        assert told.stopped


def test_a_configuration_that_is_no_good_is_said_and_changes_nothing(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text("")
    with service(tmp_path / "s", "pass", str(more)) as child:
        until_said(child, "phase=started")
        more.write_text("limits: {threads: none}\n")
        child.send_signal(signal.SIGHUP)
        said = until_said(child, "phase=not-reloaded")
        assert "limits.threads" in said
        assert "phase=stopped" not in said
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def test_a_reload_with_what_it_could_not_begin_with_is_said_and_changes_nothing(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text("")
    with service(tmp_path / "s", "pass", str(more)) as child:
        until_said(child, "phase=started")
        (tmp_path / "s" / "out").mkdir()
        more.write_text(f"store: {{url: {tmp_path}/s}}\nworker: {{runs: [{tmp_path}/s/out]}}\n")
        child.send_signal(signal.SIGHUP)
        assert "inside the store" in until_said(child, "phase=not-reloaded")
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


@contextmanager
def silent() -> Iterator[str]:
    """A server that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_store_that_does_not_answer_keeps_nobody_from_stopping(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with silent() as url, service("s3://bucket/x", CKPTSYNC_STORAGE_OPTIONS=f'{{"endpoint_url": "{url}"}}', **keys) as child:
        until_said(child, "glanced")
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert "phase=abandoned ticks=store" in error(child)


def test_a_tick_that_hangs_does_not_hang_a_reload(tmp_path: Path) -> None:
    with service(tmp_path / "s", "time.sleep(60)") as child:
        assert line(child) == "looked"
        until_said(child, "phase=started")
        child.send_signal(signal.SIGHUP)
        until_said(child, "phase=abandoned ticks=worker")
        assert child.wait(30) == 0


def test_looking_begins_before_the_store_is_there_and_sending_when_it_is(tmp_path: Path) -> None:
    with service(tmp_path / "s", ROLES="head") as child:  # no worker, which would make the store
        assert "phase=waiting" in until_said(child, "not a store")
        until_said(child, "glanced")
        create_store(str(tmp_path / "s"))
        assert line(child) == "looked"
