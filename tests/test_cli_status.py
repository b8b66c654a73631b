"""``ckptsync status`` as a transcript."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.cli.status import node_state
from ckptsync.daemon.identity import heartbeat
from ckptsync.errors import Corrupt
from ckptsync.fleet.heartbeat import Disk, beat, farewell
from ckptsync.stores.opening import open_store
from tests.cli_store import make


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


def test_status_has_nodes_and_places(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_store(str(store))
    beat(opened, heartbeat("n0", ("worker",)))
    farewell(opened, heartbeat("boss", ("head",)))
    (store / ".ckptsync" / "nodes" / "odd.json").write_text("{")
    assert main(["status", str(store)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert (rows["n0"][1:3], rows["boss"][1:3]) == (["worker", "alive"], ["head", "stopped"])
    assert "unreadable" in rows["odd"]
    assert rows["fsdp2"][2] == "VERIFIED"
    assert main(["status", str(store), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [n["node"] for n in result["nodes"]] == ["boss", "n0", "odd"]
    assert len(result["places"]) == 2


def test_status_says_how_long_things_wait_how_full_disks_are_and_what_is_odd(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heart = replace(
        heartbeat("n0", ("worker",)),
        queue=("run/checkpoint-1",),
        oldest=90.0,
        rate=5e6,
        disk=(Disk("/data/out", 10**9, 10**10, 2 * 10**9, 5 * 10**9),),
        watch={"/data/out": "polling"},
        notes=("the clock jumped by +3600 s",),
    )
    opened = open_store(str(store))
    beat(opened, heart)
    assert main(["status", str(store)]) == 0
    shown = capsys.readouterr().out
    [row, disk] = [line for line in shown.splitlines() if line.startswith("n0")]
    assert re.search(r" run/checkpoint-1 +1m30s +5 MB/s$", row)
    assert disk.split() == ["n0", "/data/out", "polling", "1", "GB", "of", "10", "GB", "2", "GB", "5", "GB"]
    assert "note: n0: the clock jumped by +3600 s" in shown
    farewell(opened, heart)
    assert main(["status", str(store)]) == 0
    assert "/data/out" not in capsys.readouterr().out, "nobody watches there any more"


def test_a_node_is_silent_after_four_periods() -> None:
    mine = heartbeat("n0", ("worker",))
    assert [node_state("x", mine, age).state for age in (0, 4 * mine.period, 4 * mine.period + 1)] == ["alive", "alive", "silent"]
    assert node_state(".ckptsync/nodes/x.json", Corrupt("bad"), 1).node == "x"


def test_status_watch_draws_again_on_a_terminal_until_it_is_interrupted(store: Path) -> None:
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "ckptsync", "status", str(store), "--watch"]
    with subprocess.Popen(command, stdout=follower, env={**os.environ, "TERM": "xterm"}) as child:
        os.close(follower)
        seen = b""
        while seen.count(b"\x1b[H") < 2 or b"VERIFIED" not in seen:
            seen += os.read(leader, 65536)
        child.terminate()
        child.wait(10)
    os.close(leader)
    assert child.returncode == 143
