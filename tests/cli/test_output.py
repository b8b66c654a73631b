"""What a command prints: tables, JSON, colours, and the progress of long work."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptsync.cli.output import (
    COLOURS,
    aligned,
    columns,
    paint,
    print_json,
    print_table,
    progress,
)

PLAIN = Namespace(json=False)


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    names: frozenset[str]


def test_columns_line_up_and_the_last_is_not_padded() -> None:
    assert aligned([["a", "bb", "c"], ["aaa", "b", "cc"]]) == ["a    bb  c", "aaa  b   cc"]
    assert aligned([]) == []
    chinese = aligned([["模型", "x", "y"], ["run", "x", "y"]])
    assert [columns(line.partition("x")[0]) for line in chinese] == [6, 6]


def test_only_a_word_that_stands_alone_is_coloured_and_off_a_terminal_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as m:
        m.setattr(sys.stdout, "isatty", lambda: True)
        assert paint("run  VERIFIED  ok") == f"run  \x1b[{COLOURS['VERIFIED']}mVERIFIED\x1b[0m  ok"
        assert paint("run/UNVERIFIED ok") == "run/UNVERIFIED ok"
        for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
            with pytest.MonkeyPatch.context() as unwanted:
                unwanted.setenv(name, value)
                assert paint("run  VERIFIED  ok") == "run  VERIFIED  ok"
    print_table(["RUN", "WORD"], [["a", "DAMAGED"]])
    assert capsys.readouterr().out == "RUN  WORD\na    DAMAGED\n"


def test_json_is_one_line_of_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"p": Point(1, frozenset("b")), "path": Path("/x"), "text": "é\n"})
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "format": 1,
        "exit_code": 0,
        "p": {"x": 1, "names": ["b"]},
        "path": "/x",
        "text": "é\n",
    }
    assert out.count("\n") == 1
    assert out.isascii()


@pytest.mark.parametrize("is_json", [False, True])
def test_quick_work_and_json_print_no_progress(
    *, is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(Namespace(json=is_json), "merging") as show:
        show(1, 10)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("times", "amounts", "lines"),
    [
        (
            (0.0, 6.0, 40.0, 46.0, 80.0),
            (1000, 2000, 3000, 4000),
            ["2 KB of 5 KB, 50 B/s, 1m left", "4 KB of 5 KB, 50 B/s, 20s left"],
        ),
        # bytes that have to be uploaded again count as not done; a transfer that stands still
        # promises no end
        (
            (0.0, 40.0, 80.0, 120.0),
            (2000, 2000, 1000),
            ["2 KB of 5 KB, 50 B/s, 1m left", "2 KB of 5 KB, 0 B/s", "1 KB of 5 KB, 0 B/s"],
        ),
    ],
)
def test_long_work_prints_a_line_now_and_then(
    times: tuple[float, ...],
    amounts: tuple[int, ...],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(times)
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with progress(PLAIN, "merging") as show:
        for done in amounts:
            show(done, 5000)
    assert capsys.readouterr().err.splitlines() == [f"ckptsync: merging: {line}" for line in lines]


def test_who_interrupts_it_reads_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def upload(done: int) -> None:
        with progress(PLAIN, "uploading run", "are stored; the same command continues") as show:
            show(done, 303_000_000)
            raise KeyboardInterrupt

    def interrupted(done: int) -> str:
        with pytest.raises(KeyboardInterrupt):
            upload(done)
        return capsys.readouterr().err

    kept = "77 MB of 303 MB are stored; the same command continues"
    assert interrupted(77_000_000) == f"ckptsync: uploading run: {kept}\n"
    assert not interrupted(0)


def test_on_a_terminal_there_is_a_bar_on_stderr() -> None:
    code = "from argparse import Namespace\nfrom ckptsync.cli.output import progress\n"
    code += "with progress(Namespace(json=False), 'merging') as show: show(5, 10)\nprint('done')"
    leader, follower = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        stderr=follower,
        stdout=subprocess.PIPE,
        check=True,
        env=environment,
    )
    os.close(follower)
    assert ran.stdout == b"done\n"
    assert b"merging" in os.read(leader, 10000)
    os.close(leader)
