"""``ckptsync status``: the document, the exit codes, the picture on a terminal.

Nothing is wider than the terminal or commands it.
"""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.location_summary import Proven
from ckptsync.cli.output import columns
from ckptsync.cli.screen import MOST, Screen
from ckptsync.cli.status import overview_lines
from ckptsync.errors import StoreError, Transient
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.progress import Progress
from ckptsync.service.monitor import OverviewReader
from ckptsync.service.process_control import heartbeat
from ckptsync.status.alarms import CODES, Patience
from ckptsync.status.heartbeat import Disk, beat, farewell
from ckptsync.status.overview import Overview, Room
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_store
from tests.support.command_line import Cli
from tests.support.exhaustive import sampled
from tests.support.head_in_process import verify_next
from tests.support.reference_pages import SCHEMA, json_keys
from tests.support.small_store import SHARD, flip, make
from tests.support.status_examples import HOUR, NOW, fact, heart, job, location, shown, waiting
from tests.support.terminal import on_terminal, read_until

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring.md"


@pytest.fixture
def store(named: Path) -> Path:
    return make(named)


def section(title: str) -> str:
    return MONITORING.read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_status_has_nodes_and_runs(store: Path, cli: Cli) -> None:
    opened = open_store(str(store))
    beat(opened, heartbeat("n0", ("worker",)))
    farewell(opened, heartbeat("boss", ("head",)))
    (store / ".ckptsync" / "nodes" / "odd.json").write_text("{")
    rows = {row[0]: row for line in cli("status").out.splitlines() if (row := line.split())}
    assert (rows["n0"][1:3], rows["boss~head"][1:3]) == (["worker", "alive"], ["head", "stopped"])
    assert "unreadable" in rows["odd"]
    assert rows["fsdp2"][5] == "VERIFIED"
    assert rows["zero3"][5] == "INCOMPLETE"


def test_one_document_has_what_ls_has_and_all_the_rest(store: Path, cli: Cli) -> None:
    now = time.time()
    mine = replace(
        heartbeat("n0", ("worker", "head")),
        running=(
            *waiting("run/checkpoint-1", since=now - 90),
            job("verify", "fsdp2/checkpoint-4", done=1, total=2, since=now - 3),
        ),
        rate=5e6,
        disk=(Disk("/data/out", 10**12, 10**13, 2 * 10**9, 5 * 10**9),),
        watch={"/data/out": "polling"},
    )
    beat(open_store(str(store)), mine)
    made = cli("status", "--json").json
    [node] = made["nodes"]
    assert (node["node"], node["state"], node["rate"]) == ("n0", "alive", 5e6)
    assert 89 < node["oldest"] < 1000
    assert node["queue"] == ["fsdp2/checkpoint-4", "run/checkpoint-1"]
    assert [entry["kind"] for entry in made["running"]] == ["verify", "upload"]
    assert (node["disk"][0]["spool"], node["watch"]) == (2 * 10**9, {"/data/out": "polling"})
    assert node["jobs"][0]["kind"] == "verify"
    runs = {run["run"]: run["checkpoints"] for run in made["runs"]}
    awaited = {"run": {"WAITING": 1}}
    assert runs == {"fsdp2": {"VERIFIED": 1}, "zero3": {"INCOMPLETE": 1}} | awaited
    assert made["room"]["total"] > 0
    listed = cli("ls", "--json").json
    assert {key: made[key] for key in listed} == listed


def keys(value: Any, above: str = "") -> set[str]:
    """Every key of a document, with those above it.

    Of a list the keys of its items; of what has names for keys, none.
    """
    if isinstance(value, list):
        return set().union(*(keys(item, above) for item in value))
    by_name = ("checkpoints", "watch", "trains", "lacks", "locations")
    if not isinstance(value, dict) or above.rpartition(".")[2] in by_name:
        return set()
    found = {f"{above}.{key}".lstrip("."): inner for key, inner in value.items()}
    return set(found).union(*(keys(inner, key) for key, inner in found.items()))


def test_the_document_has_the_keys_that_are_written_down(store: Path, cli: Cli) -> None:
    flip(store / "fsdp2" / SHARD)
    opened = open_store(str(store))
    verify_next(opened, VerifyPolicy("digest", 1e-9), 0.0)
    busy: dict[str, Any] = {"disk": (Disk("/", 1, 2, 3),), "running": (job("a", "b"),)}
    beat(opened, replace(heartbeat("n0", ("worker",)), **busy))
    opened.write("fsdp2/.ckptsync/checkpoint-99/sending/n0", [b"sending\n"])
    made = cli("status", "--json").json
    assert made["repairs"]
    running = {f"running.{key}" for key, _, _ in json_keys(SCHEMA, "running")}
    of_all = json_keys(SCHEMA, "document")
    written = running | {key for key, _, _ in [*of_all, *json_keys(SCHEMA, "status")]}
    found = {re.sub(r"^runs\.(verified|unverified)\.", "runs.newest.", key) for key in keys(made)}
    assert found - written == set()
    not_here = ("retired.", "kept.", "runs.incomplete.siblings.")
    assert {key for key in written - found if not key.startswith(not_here)} == set()


def test_every_alarm_is_written_down() -> None:
    rows = [line.split("|") for line in section("Alarms").splitlines() if line.startswith("| `")]
    written = {
        code: row[2].strip(" `") for row in rows for code in re.findall("`([a-z-]+)`", row[1])
    }
    assert written == CODES


def test_check_exits_with_0_1_or_10_and_says_why(store: Path, cli: Cli) -> None:
    assert cli("status", "--check").out.startswith("OK: ")
    opened = open_store(str(store))
    late = waiting("run/checkpoint-1", since=time.time() - 1e5)
    beat(opened, replace(heartbeat("n0", ("worker",)), running=late))
    assert cli("status", "--check", code=1).out.startswith(
        "WARNING waiting: n0: 1 in the upload queue, the oldest for 1d3h"
    )
    cli("status")  # an alarm is no failure of the command
    flip(store / "fsdp2" / SHARD)
    verify_next(opened, VerifyPolicy("digest", 1e-9), 0.0)
    assert cli("status", "--check", code=10).out.startswith(
        "CRITICAL damaged: fsdp2/checkpoint-4: "
    )


def test_how_long_silence_may_last_is_configured(store: Path, cli: Cli, tmp_path: Path) -> None:
    beat(open_store(str(store)), heartbeat("n0", ("worker",)))
    path = store / ".ckptsync" / "nodes" / "n0.json"
    os.utime(path, (path.stat().st_mtime - 700, path.stat().st_mtime - 700))
    text = path.read_text()
    path.write_text(re.sub(r'"machine":"[^"]*"', '"machine":"other"', text))
    os.utime(path, (path.stat().st_mtime - 700, path.stat().st_mtime - 700))
    assert "no heartbeat for 11m" in cli("status", "--check", code=1).out
    config = tmp_path / "head.yaml"
    config.write_text(f"roles: [head]\nstore: {{url: {store}}}\nhead: {{patience_node: 1h}}\n")
    cli("status", "-c", config, "--check")


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    store: Path, tmp_path: Path, cli: Cli
) -> None:
    page = tmp_path / "status.html"
    assert "written, open it" in cli("status", "--html", page).out
    before = page.read_bytes()
    (tmp_path / "status.html.part").mkdir()
    assert "name a file that you may write" in cli("status", "--html", page, code=1).err
    assert page.read_bytes() == before


def test_a_record_that_cannot_be_read_is_the_exit_code_too(store: Path, cli: Cli) -> None:
    [manifest] = (store / "zero3" / ".ckptsync" / "checkpoint-4").glob("manifest-*")
    flip(manifest)
    for words in (["ls"], ["status"], ["status", "--check"]):
        said = cli(*words, code=10).out
        assert f"zero3/.ckptsync/checkpoint-4/{manifest.name}" in said
    cli("keep", "--list", code=10)


def test_watch_off_a_terminal_is_a_document_a_line(store: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "status", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        first = json.loads(child.stdout.readline())
        second = json.loads(child.stdout.readline())
        child.terminate()
        child.wait(60)
    assert second["at"] > first["at"]
    assert second["locations"] == first["locations"]
    assert child.returncode == 143


class Away(MemoryStore):
    """Fails with an error while it has one."""

    error: StoreError | None = None

    def names(self, prefix: str) -> Iterator[Entry]:
        if self.error:
            raise self.error
        return super().names(prefix)


def screen(store: Away) -> Screen[Overview]:
    catalogue = partial(read_catalogue, store, Cache())
    return Screen(OverviewReader(store, catalogue, Patience()).read, overview_lines, store.url)


@pytest.mark.parametrize(
    ("command", "width"), sampled(itertools.product(["ls", "status"], [60, 80, 120]), 3)
)
def test_a_picture_fits_its_terminal_and_ends_with_q(store: Path, command: str, width: int) -> None:
    now, name = time.time(), "训练-🚀" * 12
    work = waiting(f"{name}/checkpoint-8", since=now, until=now + 600, reason="第 8 步 " * 20)
    beat(open_store(str(store)), replace(heartbeat("n0", ("worker",)), running=work))
    words = [sys.executable, "-m", "ckptsync", command, "--watch"]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": str(width), "LINES": "40"}
    expected = (b"VERIFIED", b"WAITING", b"n0 waits")
    with on_terminal(words, ["stdin", "stdout"], env=terminal, start_new_session=True) as (
        child,
        leader,
    ):
        seen = read_until(leader, lambda seen: all(word in seen for word in expected))
        os.write(leader, b"q")
        seen += read_until(leader, lambda more: b"\x1b[?1049l" in more)
        assert child.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", seen.decode(errors="replace"))
    assert max(columns(line) for line in text.replace("\r", "\n").split("\n")) <= width


def test_a_store_that_no_longer_answers_leaves_the_last_picture_with_the_reason() -> None:
    store = Away("memory://there")
    shown, late = screen(store), "WARNING the store has not answered for 0s: "
    assert shown.draw_text().plain.splitlines() == ["store memory://there", "reading ..."]
    shown.refresh()
    assert shown.draw_text().plain.startswith("store memory://there  ")
    shown.emit(logging.makeLogRecord({"msg": "memory: 503, trying again"}))
    assert shown.draw_text().plain.startswith(f"{late}memory: 503, trying again")
    store.error = Transient("memory: 504")
    shown.refresh()
    assert shown.draw_text().plain.startswith(f"{late}memory: 504")
    assert "no checkpoints yet" in shown.draw_text().plain
    store.error = None
    shown.refresh()
    assert shown.draw_text().plain.startswith("store memory://there  ")
    never = Away()
    never.error = StoreError("memory: refused")
    with pytest.raises(StoreError, match="refused"):
        screen(never).refresh()


def test_no_more_is_drawn_than_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "80")
    shown = screen(Away())
    shown.refresh()
    lines = shown.draw_text().plain.splitlines()
    assert len(lines) == 5
    assert re.fullmatch(r"\(\d+ more lines: .*", lines[-1])


LONG = "llama-3-405b-full-parameter-finetune-on-eight-nodes-second-try"


def busy() -> Overview:
    """Two nodes and a head at work, a run that is well and one that is not."""
    worker = heart(
        queue=("new/checkpoint-300", "new/checkpoint-400"),
        oldest=90.0,
        rate=12e6,
        disk=(Disk("/data/out", 10**9, 10**10, 2 * 10**9, 5 * 10**9),),
        watch={"/data/out": "polling"},
        errors=(f"store: 503 of {'x' * 90}",),
        notes=("the clock jumped",),
    )
    head = heart(
        "boss",
        ("head", "verifier"),
        running=(job("consolidate", f"{LONG}/checkpoint-300", done=45 * 10**8, total=10**10),),
        verifies=9e9,
    )
    hurt = location(
        "new/checkpoint-2",
        "DAMAGED",
        HOUR,
        evidence=("model: digest: differs",),
        proof=Proven(damage=("r",), damaged_at=NOW - 60),
    )
    late = location(
        "new/checkpoint-4", "INCOMPLETE", 2 * HOUR, missing_lines=("__3_0.distcp: n9 has it",)
    )
    good = location(f"{LONG}/checkpoint-1200", size=3 * 10**12, nodes=("n7",))
    told = (worker, head, heart("gone", ago=2 * HOUR), fact("gone"), heart("done", stopped=True))
    return shown(*told, locations=[hurt, late, good], room=Room(10**13, 10**14))


@pytest.mark.parametrize("width", [20, 40, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_text_is_lost(width: int) -> None:
    lines = overview_lines(busy(), width)
    assert max(len(line) for line in lines) <= width
    text = "".join("".join(lines).split())
    for part in ("startitsservice", "n9hasit", "LASTGOOD", "RATE"):
        assert part in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_in_chinese_are_as_wide_as_they_are_shown(width: int) -> None:
    name = "大模型全参数微调" * 8
    told = shown(
        heart(errors=(f"存储 {'无法连接' * 40}",)),
        locations=[location(f"{name}/checkpoint-4"), location("short/checkpoint-4")],
    )
    lines = overview_lines(told, width)
    assert max(map(columns, lines)) <= width
    assert "".join(lines).replace(" ", "").count("无法连接") == 40


def test_what_is_wrong_comes_first_with_what_to_do_and_the_rest_stands_below() -> None:
    said = overview_lines(busy())
    assert said[0].startswith("store /store  1970-01-12 13:46:40Z")
    assert said[1].startswith(
        "nodes: 2 alive, 1 silent, 1 stopped; runs: 2; locations: 2 WAITING, 1 INCOMPLETE,"
        " 1 VERIFIED, 1 DAMAGED; 3 TB"
    )
    assert said[2] == "10 TB of 100 TB free"
    assert said[4] == "CRITICAL damaged for 1m: new/checkpoint-2: model: digest: differs"
    assert said[5].startswith("  -> n0 uploads again what it still has; ")
    headings = [n for n, line in enumerate(said) if line.startswith(("NODE", "RUN"))]
    assert [said[n].split()[0] for n in headings] == ["RUN", "NODE"]
    work = said.index(f"{LONG}/checkpoint-300: boss consolidates, 45 % of 10 GB")
    assert 5 < work < headings[0], "what runs comes after the alarms, and before runs and nodes"


def test_a_node_shows_what_it_does_and_what_it_says() -> None:
    said = overview_lines(busy())
    row = next(n for n, line in enumerate(said) if line.startswith("n0 "))
    assert said[row].split() == ["n0", "worker", "alive", "5s", "2", "1m35s", "-"]
    below = "\n".join(said[row + 1 : row + 5])
    for line in (
        "disk   /data/out: 1 GB of 10 GB free, 2 GB of 5 GB only pinned, watched by polling",
        "error  store: 503",
        "note   the clock jumped",
    ):
        assert line in below
    assert "new/checkpoint-400: n0 waits" in said


def test_what_nodes_do_with_a_location_is_said_once_and_with_the_same_rate() -> None:
    sent = Progress(
        kind="upload",
        state="uploading",
        run="run",
        checkpoint="checkpoint-2",
        since=NOW - 60,
        done=10**8,
        total=2 * 10**8,
        rate=5e6,
    )
    half = location(
        "run/checkpoint-2", "INCOMPLETE", size=2 * 10**8, nodes=("n9",), missing_lines=("a",)
    )
    said = overview_lines(shown(heart(running=(sent,), rate=1e6), locations=[half]))
    assert "run/checkpoint-2: n0 uploads, 50 % of 200 MB, 5 MB/s, 15s left" in said
    assert len([line for line in said if "%" in line]) == 1
    row = next(line for line in said if line.startswith("n0 "))
    assert row.split()[-3:] == ["1m", "5", "MB/s"]
    waits = shown(heart(queue=("run/checkpoint-2",)), locations=[half])
    assert not [line for line in overview_lines(waits) if line.startswith("  incomplete")]


def test_a_run_shows_its_newest_what_waits_and_what_is_missing() -> None:
    said = overview_lines(busy())
    row = next(n for n, line in enumerate(said) if line.startswith("new "))
    assert said[row].split() == ["new", "4", "2", "KB", "2", "DAMAGED", "1h", "-"]
    assert said[row + 1 : row + 4] == [
        "  locations 2 WAITING, 1 INCOMPLETE, 1 DAMAGED",
        "  oldest unverified checkpoint-2, DAMAGED for 1h",
        "  incomplete checkpoint-4 for 2h: __3_0.distcp: n9 has it",
    ]
    five = [location(f"run/checkpoint-{n}", "INCOMPLETE", HOUR - n) for n in range(1, 6)]
    lines = [line.split() for line in overview_lines(shown(locations=five))]
    newest = [words[1] for words in lines if words[:1] == ["incomplete"]]
    assert newest == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def test_nodes_in_trouble_come_first_and_of_very_many_some_are_shown() -> None:
    well = (heart(f"n{n:03}", errors=("e",) if n == 50 else ()) for n in range(100))
    many = shown(*well, heart("z", ago=2 * HOUR), locations=[])
    rows = [line for line in overview_lines(many, 80) if line.startswith(("n0", "z"))]
    assert [row.split()[0] for row in rows[:3]] == ["z", "n050", "n000"]
    assert len(rows) == MOST
    assert "and 81 more" in overview_lines(many, 80)


def test_names_cannot_command_the_terminal() -> None:
    proof = Proven(damage=("r",), damaged_at=1.0)
    hurt = location("r\x07/checkpoint-1", "DAMAGED", evidence=("\x1b[2Jgone",), proof=proof)
    seen = shown(heart("n\x1b]0;", errors=("a\nb\r",)), locations=[hurt])
    text = overview_lines(seen, 80)
    assert all(unicodedata.category(c)[0] != "C" for line in text for c in line)


def test_an_empty_store_says_so() -> None:
    assert [line for line in overview_lines(shown()) if line][2:] == [
        "no checkpoints yet",
        "no node has written to this store",
    ]


@pytest.mark.parametrize("at", [-1e12, 1e12, 1e300])
def test_a_files_time_that_no_calendar_has_hides_nothing(at: float) -> None:
    assert any("boss" in line for line in overview_lines(replace(busy(), at=at)))
