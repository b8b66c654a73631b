"""``ckptsync status`` as a transcript."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.cli.status import node_state
from ckptsync.daemon.identity import heartbeat
from ckptsync.errors import Corrupt
from ckptsync.fleet.heartbeat import beat, farewell
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
