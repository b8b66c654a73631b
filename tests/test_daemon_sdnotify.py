"""What systemd is told."""

import os
import socket
from pathlib import Path

import pytest

from ckptsync.daemon.sdnotify import Notifier


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
def test_the_watchdog_is_ours_only_if_its_process_is(environment: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environment).watchdog == seconds
