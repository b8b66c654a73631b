"""How the demo is shown."""

import json
import os
import subprocess
import sys

import pytest

from ckptsync.cli.demo_view import Json, Lines, view

ROW = ["fsdp2", "checkpoint-4", "ARRIVING", "1 KB", "1", "x: no node has sent it"]
DONE = [*ROW[:2], "VERIFIED", *ROW[3:]]


def test_off_a_terminal_only_rows_that_changed_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for rows in ([ROW], [ROW], [DONE], [DONE, ["zero3", *ROW[1:]]]):
        lines.table(rows)
    lines.say("a\x1bb")
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["fsdp2", "fsdp2", "zero3", "a\\x1bb"]


def test_json_is_an_event_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = Json()
    told.say("begins")
    told.table([ROW])
    told.table([ROW])
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0] == {"say": "begins"}
    assert events[1]["table"][0]["state"] == "ARRIVING"
    assert len(events) == 2


def test_the_view_fits_where_the_output_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with view(as_json=False) as plain, view(as_json=True) as told:
        assert (type(plain), type(told)) == (Lines, Json)


def test_on_a_terminal_the_table_is_live() -> None:
    code = (
        "from ckptsync.cli.demo_view import view\n"
        f"with view(as_json=False) as v:\n v.say('it begins')\n v.table([{ROW}])\n v.table([{DONE}])"
    )
    leader, follower = os.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=follower, check=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    os.close(follower)
    shown = os.read(leader, 65536)
    os.close(leader)
    assert b"it begins" in shown
    assert b"\x1b[32mVERIFIED" in shown
