"""How far long work is."""

import os
import subprocess
import sys

import pytest

from ckptsync.cli import progress


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
    assert capsys.readouterr().err == "ckptsync: merging: 2 KB of 5 KB\nckptsync: merging: 4 KB of 5 KB\n"


def test_on_a_terminal_there_is_a_bar_on_stderr() -> None:
    code = "from ckptsync.cli.progress import shown\nwith shown('merging') as told: told(5, 10)\nprint('done')"
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
