"""Which process this is, and whether another one lives."""

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
from ckptsync.service.own_process import Locks, Notifier, heartbeat, is_running, stopping
from ckptsync.spool.markers import began
from ckptsync.walk import UnsafeSpool


def test_a_process_is_running_and_has_an_instance_of_its_own() -> None:
    mine = heartbeat("n", ("worker",))
    assert is_running(replace(mine, pid=os.getppid(), began=began(os.getppid()))) is True
    assert heartbeat("n", ("worker",)).instance != mine.instance


def test_this_process_before_it_was_reloaded_is_not_running() -> None:
    assert is_running(heartbeat("n", ("worker",))) is False


def test_a_process_that_has_ended_is_not_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    mine = replace(heartbeat("n", ("worker",)), pid=child.pid, began=began(child.pid))
    child.wait()
    assert is_running(mine) is False


def test_a_process_that_was_killed_and_that_nobody_has_waited_for_is_not_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = replace(heartbeat("n", ("worker",)), pid=child.pid, began=began(child.pid))
    assert is_running(mine) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(mine) is False
    child.communicate()


def test_a_process_that_only_inherited_the_number_is_not_the_same() -> None:
    assert is_running(replace(heartbeat("n", ("worker",)), began="1")) is False
    assert is_running(replace(heartbeat("n", ("worker",)), pid=2**22 + 1, began="")) is False


def test_a_process_of_another_machine_cannot_be_asked() -> None:
    assert is_running(replace(heartbeat("n", ("worker",)), machine="another")) is None
    assert began(os.getpid()).isdigit()


def test_a_second_worker_of_the_same_node_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "_ckptsync")
    first.close()
    second.hold(tmp_path / "_ckptsync")
    second.close()


def test_a_spool_that_was_removed_with_its_output_directory_is_made_and_locked_again(
    tmp_path: Path,
) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "_ckptsync")
    shutil.rmtree(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    assert not (tmp_path / "_ckptsync").exists(), (
        "somebody may be about to remove what it is in, too"
    )
    os.utime(tmp_path, (0, 0))
    first.hold(tmp_path / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "_ckptsync")
    first.close()


def test_nodes_that_share_an_output_directory_do_not_exclude_each_other(tmp_path: Path) -> None:
    locks = [Locks("n0"), Locks("n1")]
    for lock in locks:
        lock.hold(tmp_path / "_ckptsync")
    for lock in locks:
        lock.close()


def test_a_link_in_the_locks_location_is_not_followed(spool: Path) -> None:
    (spool / "worker-n0.lock").symlink_to(spool / "elsewhere")
    with pytest.raises(StoreError):
        Locks("n0").hold(spool)
    assert not (spool / "elsewhere").exists()


def test_a_spool_that_cannot_be_made_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").write_text("")
    with pytest.raises(UnsafeSpool, match="_ckptsync: no directory"):
        Locks("n0").hold(tmp_path / "_ckptsync")
    with pytest.raises(StoreError, match="gone"):
        Locks("n0").hold(tmp_path / "gone" / "_ckptsync")
    assert [p.name for p in tmp_path.iterdir()] == ["_ckptsync"]


def listening(address: str) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.settimeout(5)
    s.bind(address)
    return s


def test_lines_arrive_as_one_datagram(tmp_path: Path) -> None:
    with listening(str(tmp_path / "notify")) as s:
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).send("READY=1", "STATUS=two\nlines")
        assert s.recv(1000) == b"READY=1\nSTATUS=two lines"


def test_an_abstract_address_is_understood() -> None:
    with listening(f"\0ckptsync-test-{os.getpid()}") as s:
        Notifier({"NOTIFY_SOCKET": f"@ckptsync-test-{os.getpid()}"}).send("STOPPING=1")
        assert s.recv(1000) == b"STOPPING=1"


def test_nobody_listening_is_no_fault(tmp_path: Path) -> None:
    Notifier({}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send("READY=1")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_only_if_its_process_is(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert Notifier(environment).watchdog == seconds


def test_a_signal_ends_the_wait_at_once() -> None:
    with stopping() as stop:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begun = time.monotonic()
        assert stop.wait(600)
        assert time.monotonic() - begun < 300
        assert stop.code == 0


def test_a_fault_in_a_thread_decides_the_exit_code_and_a_later_signal_does_not() -> None:
    with stopping() as stop:
        thread = threading.Thread(target=stop.ask, args=(1,))
        thread.start()
        assert stop.wait(60)
        thread.join()
        stop.ask(0)
        stop.ask(2)
        assert stop.code == 1


def test_nothing_asked_is_a_whole_wait_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopping() as stop:
        assert not stop.wait(0.05)
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


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


STUBBORN = """
import time
from ckptsync.service.own_process import stopping
with stopping() as stop:
    print("ready", flush=True)
    stop.wait(600)
    print("first", flush=True)
    time.sleep(600)
"""


def test_a_second_signal_ends_the_process_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "first\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 128 + signal.SIGINT
