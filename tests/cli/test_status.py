"""``ckptsync status`` as a transcript."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli.main import main
from ckptsync.fleet.alarms import CODES
from ckptsync.fleet.heartbeat import Disk, Job, beat, farewell
from ckptsync.head.consolidate import HeadOptions
from ckptsync.service.process import heartbeat
from ckptsync.stores.opening import open_store
from ckptsync.stores.posix.store import PosixStore
from ckptsync.verify.due import Schedule
from tests.cli_store import DATA, SHARD, flip, make
from tests.heads import consolidate_due, verify_next

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring.md"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make(tmp_path / "store")


def section(title: str) -> str:
    return MONITORING.read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def told(store: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["status", str(store), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_status_has_nodes_and_runs(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_store(str(store))
    beat(opened, heartbeat("n0", ("worker",)))
    farewell(opened, heartbeat("boss", ("head",)))
    (store / ".ckptsync" / "nodes" / "odd.json").write_text("{")
    assert main(["status", str(store)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert (rows["n0"][1:3], rows["boss~head"][1:3]) == (["worker", "alive"], ["head", "stopped"])
    assert "unreadable" in rows["odd"]
    assert rows["fsdp2"][5] == "VERIFIED"
    assert rows["zero3"][5] == "ARRIVING"


def test_one_document_has_what_ls_has_and_all_the_rest(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = replace(
        heartbeat("n0", ("worker", "head")),
        queue=("run/checkpoint-1",),
        oldest=90.0,
        rate=5e6,
        disk=(Disk("/data/out", 10**12, 10**13, 2 * 10**9, 5 * 10**9),),
        watch={"/data/out": "polling"},
        jobs=(Job("verify", "fsdp2/checkpoint-4", 1, 2, 3.0),),
    )
    beat(open_store(str(store)), mine)
    made = told(store, capsys)
    [node] = made["nodes"]
    assert (node["node"], node["state"], node["oldest"], node["rate"]) == ("n0", "alive", 90.0, 5e6)
    assert (node["disk"][0]["spool"], node["watch"], node["jobs"][0]["kind"]) == (2 * 10**9, {"/data/out": "polling"}, "verify")
    assert [(r["run"], r["checkpoints"]) for r in made["runs"]] == [("fsdp2", {"VERIFIED": 1}), ("zero3", {"ARRIVING": 1})]
    assert made["room"]["total"] > 0
    assert main(["ls", str(store), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {key: made[key] for key in listed} == listed


def keys(value: Any, above: str = "") -> set[str]:
    """Every key of a document, with those above it; of a list the keys of its items; of what has names for keys, none."""
    if isinstance(value, list):
        return set().union(*(keys(item, above) for item in value))
    if not isinstance(value, dict) or above.rpartition(".")[2] in ("checkpoints", "watch", "trains", "lacks", "locations"):
        return set()
    return {f"{above}.{k}".lstrip(".") for k in value}.union(*(keys(v, f"{above}.{k}".lstrip(".")) for k, v in value.items()))


def test_the_document_has_the_keys_that_are_written_down_and_no_others(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store / "fsdp2" / SHARD)
    verify_next(open_store(str(store)), Schedule("digest", 1e-9), 0.0)
    mine = replace(heartbeat("n0", ("worker",)), disk=(Disk("/", 1, 2, 3),), jobs=(Job("a", "b"),))
    beat(open_store(str(store)), mine)
    made = told(store, capsys)
    assert made["repairs"]
    written = set(re.findall(r"^\| `([a-z_.]+)` \|", section("The document"), re.MULTILINE))
    found = {re.sub(r"^runs\.(verified|unverified)\.", "runs.newest.", key) for key in keys(made)}
    assert found - written == set()
    assert {key for key in written - found if not key.startswith(("retired.", "kept.", "runs.arriving.siblings."))} == set()


def test_every_alarm_is_written_down() -> None:
    rows = [line.split("|") for line in section("Alarms").splitlines() if line.startswith("| `")]
    written = {code: row[2].strip(" `") for row in rows for code in re.findall("`([a-z-]+)`", row[1])}
    assert written == CODES


def test_check_exits_with_0_1_or_10_and_says_why(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(store), "--check"]) == 0
    assert capsys.readouterr().out.startswith("OK: ")
    opened = open_store(str(store))
    beat(opened, replace(heartbeat("n0", ("worker",)), queue=("run/checkpoint-1",), oldest=1e5))
    assert main(["status", str(store), "--check"]) == 1
    assert capsys.readouterr().out.startswith("WARNING waiting: n0: 1 on the way, the first for 1d3h")
    assert main(["status", str(store)]) == 0, "an alarm is no failure of the command"
    flip(store / "fsdp2" / SHARD)
    verify_next(opened, Schedule("digest", 1e-9), 0.0)
    capsys.readouterr()
    assert main(["status", str(store), "--check"]) == 10
    assert capsys.readouterr().out.startswith("CRITICAL damaged: fsdp2/checkpoint-4: ")


def test_a_configuration_says_how_long_silence_may_last(store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    beat(open_store(str(store)), heartbeat("n0", ("worker",)))
    path = store / ".ckptsync" / "nodes" / "n0.json"
    os.utime(path, (path.stat().st_mtime - 700, path.stat().st_mtime - 700))
    text = path.read_text()
    path.write_text(re.sub(r'"machine":"[^"]*"', '"machine":"other"', text))
    os.utime(path, (path.stat().st_mtime - 700, path.stat().st_mtime - 700))
    assert main(["status", str(store), "--check"]) == 1
    assert "no sign of life for 11m" in capsys.readouterr().out
    config = tmp_path / "head.yaml"
    config.write_text(f"roles: [head]\nstore: {{url: {store}}}\nhead: {{patience_node: 1h}}\n")
    assert main(["status", "-c", str(config), "--check"]) == 0


def test_a_record_that_cannot_be_read_is_the_exit_code_too(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [manifest] = (store / "zero3" / ".ckptsync" / "checkpoint-4").glob("manifest-*")
    flip(manifest)
    assert main(["status", str(store)]) == 10
    assert "unreadable: zero3/.ckptsync/checkpoint-4/manifest-" in capsys.readouterr().out
    assert main(["status", str(store), "--check"]) == 10


def test_what_is_repaired_is_no_alarm_any_more(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_store(str(store))
    flip(next((store / "fsdp2" / "consolidated" / "checkpoint-4").glob("*.safetensors")))
    verify_next(opened, Schedule("digest", 1e-9), 0.0)
    assert main(["status", str(store), "--check"]) == 10
    consolidate_due(opened, HeadOptions(config_from={"*": str(DATA / "base")}))
    verify_next(opened, Schedule("digest", 1e-9), 0.0)
    assert main(["status", str(store), "--check"]) == 0, capsys.readouterr().out


def test_watch_off_a_terminal_is_a_document_a_line(store: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "status", str(store), "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        first = json.loads(child.stdout.readline())
        second = json.loads(child.stdout.readline())
        child.terminate()
        child.wait(10)
    assert second["at"] > first["at"]
    assert second["locations"] == first["locations"]
    assert child.returncode == 143


def test_what_was_read_is_kept_for_the_next_time(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told(store, capsys)
    read: list[str] = []
    whole = PosixStore.read_into

    def counted(self: PosixStore, name: str, start: int, out: memoryview) -> None:
        read.append(name)
        whole(self, name, start, out)

    monkeypatch.setattr(PosixStore, "read_into", counted)
    told(store, capsys)
    assert not [name for name in read if "/.ckptsync/" in name]
