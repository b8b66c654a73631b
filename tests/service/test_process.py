"""Which process this is, its locks and signals, and what it says to systemd."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, StoreError
from ckptsync.service import process_control
from ckptsync.service.process_control import Locks, Notifier, heartbeat, is_running, stopping
from ckptsync.spool.markers import start_time
from ckptsync.stores.progress_signs import is_shutting_down
from ckptsync.walk import UnsafeSpool


def test_a_process_is_running_that_lives_on_this_machine_and_is_not_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = heartbeat("n", ("worker",))
    assert heartbeat("n", ("worker",)).instance != mine.instance
    assert start_time(os.getpid()).isdigit()
    parent = os.getppid()
    for change, expected in (
        ({"pid": parent, "began": start_time(parent)}, True),
        ({}, False),  # this very process, before it was reloaded
        ({"began": "1"}, False),  # one that only inherited the number
        ({"pid": 2**22 + 1, "began": ""}, False),
        ({"machine": "another"}, None),
    ):
        assert is_running(replace(mine, **change)) is expected, change
    monkeypatch.setattr(process_control, "boot_id", str)
    assert is_running(replace(mine, machine="")) is None, "a system that has no such id"


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_process_that_was_killed_is_not_running(*, is_waited_for: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = replace(heartbeat("n", ("worker",)), pid=child.pid, began=start_time(child.pid))
    assert is_running(mine) is True
    child.kill()
    if is_waited_for:
        child.communicate()
    else:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(mine) is False
    child.communicate()


def test_a_second_worker_of_the_same_node_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second, other = Locks("n0"), Locks("n0"), Locks("n1")
    first.hold(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    other.hold(tmp_path / "_ckptsync")  # nodes that share a directory do not exclude each other
    for _ in "first", "again":
        with pytest.raises(ConfigError, match="another worker of node n0"):
            second.hold(tmp_path / "_ckptsync")
    first.close()
    second.hold(tmp_path / "_ckptsync")
    second.close()
    other.close()


def test_a_spool_that_was_removed_with_its_output_directory_is_made_and_locked_again(
    tmp_path: Path,
) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "_ckptsync")
    shutil.rmtree(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    why = "somebody may be about to remove what it is in, too"
    assert not (tmp_path / "_ckptsync").exists(), why
    os.utime(tmp_path, (0, 0))
    first.hold(tmp_path / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "_ckptsync")
    first.close()


def test_a_link_in_the_locks_location_is_not_followed(spool: Path) -> None:
    (spool / "worker-n0.lock").symlink_to(spool / "elsewhere")
    with pytest.raises(StoreError):
        Locks("n0").hold(spool)
    assert not (spool / "elsewhere").exists()


def test_a_spool_that_cannot_be_made_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").write_text("")
    with pytest.raises(UnsafeSpool, match="_ckptsync: expected a directory"):
        Locks("n0").hold(tmp_path / "_ckptsync")
    with pytest.raises(StoreError, match="gone"):
        Locks("n0").hold(tmp_path / "gone" / "_ckptsync")
    assert [p.name for p in tmp_path.iterdir()] == ["_ckptsync"]


def test_lines_arrive_as_one_datagram_at_a_path_or_an_abstract_address(tmp_path: Path) -> None:
    abstract = f"ckptsync-test-{os.getpid()}"
    for address, told in (
        (f"{tmp_path}/notify", f"{tmp_path}/notify"),
        (f"\0{abstract}", f"@{abstract}"),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.settimeout(5)
            s.bind(address)
            Notifier({"NOTIFY_SOCKET": told}).send("READY=1", "STATUS=two\nlines")
            assert s.recv(1000) == b"READY=1\nSTATUS=two lines"


def test_nobody_listening_is_no_fault(tmp_path: Path) -> None:
    Notifier({}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 30.0),
        ("30000000", "ours", 30.0),
        ("30000000", "1", None),
        ("soon", None, None),
        ("0", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_is_ours_only_if_its_process_is(
    usec: str | None, pid: str | None, seconds: float | None
) -> None:
    given = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": str(os.getpid()) if pid == "ours" else pid}
    assert Notifier({k: v for k, v in given.items() if v}).watchdog == seconds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_at_once_and_handlers_are_given_back(number: int) -> None:
    before = signal.getsignal(number)
    with stopping() as stop:
        assert not stop.wait(0.05)
        assert signal.getsignal(number) != before
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        begun = time.monotonic()
        assert stop.wait(600)
        assert time.monotonic() - begun < 300
        assert stop.code == 0
        assert is_shutting_down()
    assert signal.getsignal(number) == before


def test_a_fault_in_a_thread_decides_the_exit_code_and_a_later_signal_does_not() -> None:
    with stopping() as stop:
        thread = threading.Thread(target=stop.ask, args=(1,))
        thread.start()
        assert stop.wait(60)
        thread.join()
        stop.ask(0)
        stop.ask(2)
        assert stop.code == 1


def test_sighup_is_a_wish_that_is_heard_once_and_is_not_heard_where_it_is_ignored() -> None:
    with stopping() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.take_reload(), stop.take_reload(), stop.is_stopping) == (True, False, False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.take_reload()
    finally:
        signal.signal(signal.SIGHUP, before)
