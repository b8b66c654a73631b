"""How far long work is."""

import os
import subprocess
import sys

import pytest

from ckptsync.cli import output as progress


def test_quick_work_says_nothing_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("merging") as told:
        told(1, 10)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 5.5, 6.0, 11.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with progress.shown("merging") as told:
        for done in (1000, 2000, 3000, 4000):
            told(done, 5000)
    assert capsys.readouterr().err.splitlines() == [
        "ckptsync: merging: 2 KB of 5 KB, 364 B/s, 8s left",
        "ckptsync: merging: 4 KB of 5 KB, 364 B/s, 3s left",
    ]


def test_work_that_stands_still_says_so_and_promises_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 6.0, 12.0, 18.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with progress.shown("sending") as told:
        for done in (6000, 6000, 3000):  # bytes that have to be sent again count as not done
            told(done, 9000)
    assert [line.partition(", ")[2] for line in capsys.readouterr().err.splitlines()] == ["1 KB/s, 3s left", "0 B/s", "0 B/s"]


def test_on_a_terminal_there_is_a_bar_on_stderr() -> None:
    code = "from ckptsync.cli.output import shown\nwith shown('merging') as told: told(5, 10)\nprint('done')"
    leader, follower = os.openpty()
    ran = subprocess.run(
        [sys.executable, "-c", code], stderr=follower, stdout=subprocess.PIPE, check=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    assert ran.stdout == b"done\n"
    assert b"merging" in os.read(leader, 10000)
    os.close(leader)


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.silent("merging") as told:
        told(1, 2)
    assert capsys.readouterr() == ("", "")
