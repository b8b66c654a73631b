"""An overview as text: everything is there, nothing is wider than asked, nothing commands the terminal."""

import unicodedata
from dataclasses import replace
from typing import Any

import pytest

from ckptsync.catalogue.summary import Proven
from ckptsync.cli.status_view import MOST, alarm_lines, lines
from ckptsync.fleet.alarms import Room
from ckptsync.fleet.heartbeat import Disk, Job
from ckptsync.fleet.overview import Overview
from tests.scenes import HOUR, NOW, fact, heart, location, shown

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
        "boss", ("head", "verifier"), jobs=(Job("consolidate", f"{LONG}/checkpoint-300", 45 * 10**8, 10**10, 130.0),), verifies=9e9
    )
    hurt = location(
        "new/checkpoint-2", "DAMAGED", HOUR, evidence=("model: digest: differs",), proof=Proven(damage=("r",), said=NOW - 60)
    )
    late = location("new/checkpoint-4", "ARRIVING", 2 * HOUR, lost=("__3_0.distcp: n9 has it",))
    good = location(f"{LONG}/checkpoint-1200", size=3 * 10**12, nodes=("n7",))
    told = (worker, head, heart("gone", ago=2 * HOUR), fact("gone"), heart("done", stopped=True))
    return shown(*told, locations=[hurt, late, good], room=Room(10**13, 10**14))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in lines(busy(), width)) <= width


def test_what_is_wrong_comes_first_with_what_to_do_and_the_rest_stands_below() -> None:
    said = lines(busy())
    assert said[0].startswith("store /store  1970-01-12 13:46:40Z")
    assert said[1].startswith("nodes: 2 alive, 1 silent, 1 stopped; runs: 2; locations: 1 ARRIVING, 1 VERIFIED, 1 DAMAGED; 3 TB")
    assert said[2] == "10 TB of 100 TB free"
    assert said[4] == "CRITICAL damaged for 1m: new/checkpoint-2: model: digest: differs"
    assert said[5].startswith("  -> `ckptsync repair`")
    headings = [n for n, line in enumerate(said) if line.startswith(("NODE", "RUN"))]
    assert [said[n].split()[0] for n in headings] == ["NODE", "RUN"]


def test_a_node_shows_what_it_does_and_what_it_says() -> None:
    said = lines(busy())
    row = next(n for n, line in enumerate(said) if line.startswith("n0 "))
    assert said[row].split() == ["n0", "worker", "alive", "5s", "2", "1m30s", "12", "MB/s"]
    below = "\n".join(said[row + 1 : row + 5])
    assert "now    new/checkpoint-300 (and 1 more)" in below
    assert "disk   /data/out: 1 GB of 10 GB free, 2 GB of 5 GB only pinned, watched by polling" in below
    assert "error  store: 503" in below
    assert "note   the clock jumped" in below
    assert f"  job    consolidate {LONG}/checkpoint-300: 45% of 10 GB for 2m10s" in said


def test_a_run_shows_its_newest_what_waits_and_what_is_missing() -> None:
    said = lines(busy())
    row = next(n for n, line in enumerate(said) if line.startswith("new "))
    assert said[row].split() == ["new", "2", "2", "KB", "2", "DAMAGED", "1h", "-"]
    assert said[row + 1 : row + 4] == [
        "  locations 1 ARRIVING, 1 DAMAGED",
        "  oldest unverified checkpoint-2, DAMAGED for 1h",
        "  arriving checkpoint-4 for 2h: __3_0.distcp: n9 has it",
    ]


def test_nodes_in_trouble_come_first_and_of_very_many_some_are_shown() -> None:
    many = shown(*(heart(f"n{n:03}") for n in range(100)), heart("z", ago=2 * HOUR), locations=[])
    rows = [line for line in lines(many, 80) if line.startswith(("n0", "z"))]
    assert (rows[0].split()[0], len(rows)) == ("z", MOST)
    assert "and 81 more" in lines(many, 80)


def test_names_cannot_command_the_terminal() -> None:
    odd: dict[str, Any] = {"evidence": ("\x1b[2Jgone",), "proof": Proven(damage=("r",), said=1.0)}
    text = lines(shown(heart("n\x1b]0;", errors=("a\nb\r",)), locations=[location("r\x07/checkpoint-1", "DAMAGED", **odd)]), 80)
    assert all(unicodedata.category(c)[0] != "C" for line in text for c in line)


def test_an_empty_store_says_so() -> None:
    assert [line for line in lines(shown()) if line][2:] == ["no node has been seen here", "no checkpoints yet"]


def test_a_check_has_a_line_for_each_alarm_or_one_that_all_is_well() -> None:
    assert [line.split(":")[0] for line in alarm_lines(busy())] == [
        "CRITICAL damaged",
        "WARNING arriving",
        "WARNING node-lost",
    ]
    assert alarm_lines(shown(heart())) == ["OK: nodes: 1 alive; runs: 0; locations: none; 0 B + models 0 B"]


def test_what_a_node_says_of_itself_is_not_shown_without_end() -> None:
    job = Job("x" * 100_000, "y" * 100_000)
    seen = shown(
        heart(roles=("z" * 100_000,), errors=("e" * 100_000,) * 9, jobs=(job,) * 999, disk=(Disk("/d" * 100_000, 1, 2, 3),) * 999)
    )
    assert sum(map(len, lines(seen))) < 500_000


@pytest.mark.parametrize("at", [-1e12, 1e12, 1e300])
def test_a_files_time_that_no_calendar_has_hides_nothing(at: float) -> None:
    assert any("boss" in line for line in lines(replace(busy(), at=at)))
