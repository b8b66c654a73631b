"""``ckptsync gc`` and ``keep`` as transcripts, on a real directory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.support.command_line import Cli
from tests.support.retention_stores import FIRST, fill

CONFIG = (
    "roles: [head]\n"
    "store: {{url: {url}}}\n"
    "retention: {{keep_last: 1, grace: 1h, runs: {{other: {{keep_last: 3}}}}}}\n"
)


@pytest.fixture
def store(named: Path) -> Path:
    made = create_store(str(named))
    for n in range(1, 4):
        fill(made, f"checkpoint-{n}", FIRST + n * 3600)
    fill(made, "checkpoint-1", run="other")
    return named


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_a_dry_run_says_what_would_go_and_why_and_writes_nothing(store: Path, cli: Cli) -> None:
    before = tree(store)
    lines = cli("gc", "--keep-last", "2", "--run", "run", "--dry-run").out.splitlines()
    assert lines[0].split() == ["RUN", "CHECKPOINT", "STATUS", "SIZE", "DECISION", "REASON"]
    assert re.fullmatch(
        r"run +checkpoint-1 +VERIFIED +\d+ B +drop +not one of the newest 2", lines[3]
    )
    assert lines[-2].startswith("would mark run/checkpoint-1: ")
    assert lines[-1].startswith("3 checkpoints; 1 to mark (")
    assert tree(store) == before


def test_what_is_marked_is_removed_after_its_grace(store: Path, tmp_path: Path, cli: Cli) -> None:
    config = tmp_path / "head.yaml"
    config.write_text(CONFIG.format(url=store))
    told = cli("gc", "-c", config, "--json").json
    assert [(d["run"], d["location"], d["outcome"]) for d in told["done"]] == [
        ("run", "checkpoint-2", "marked"),
        ("run", "checkpoint-1", "marked"),
    ]
    assert len(told["locations"]) == 4
    age(store / "run/.ckptsync/checkpoint-1", 3601)
    out = cli("gc", "-c", config).out
    assert "removed: run/checkpoint-1, " in out
    assert "drop (in " in out, "the other has most of its hour before it"
    assert not (store / "run/checkpoint-1").exists()
    assert (store / "run/checkpoint-2").exists()


def age(records: Path, seconds: float) -> None:
    """A store's clock is its file system's."""
    for path in records.glob("tombstone-*"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_without_a_grace_the_next_one_removes_what_was_marked(store: Path, cli: Cli) -> None:
    """As a configuration may say, too: a full disk waits for nobody."""
    words = ("gc", "--keep-last", "1", "--grace", "0s")
    assert "2 marked" in cli(*words).out
    for _ in "ab":
        assert "1 removed" in cli(*words, "--stop-after", "0s").out
    assert not (store / "run/checkpoint-1").exists()
    assert (store / "run/checkpoint-3").exists()


def test_what_is_kept_by_hand_stays_and_says_so(store: Path, cli: Cli) -> None:
    for line, told in (
        ("", "kept from now on"),
        ("", "was kept already"),
        ("--release", "released"),
        ("--release", "was not kept"),
    ):
        assert told in cli("keep", "run/checkpoint-1", *line.split()).out
    cli("keep", "run/checkpoint-1", "--reason", "the paper")
    said = cli("gc", "--keep-last", "1", "--run", "run").out
    assert "kept by hand: the paper" in said


def test_orphaned_files_are_shown_and_deleted_when_asked_for(store: Path, cli: Cli) -> None:
    stray = store / "run/checkpoint-1/stray.bin"
    stray.write_text("x")
    draft = store / "run/checkpoint-2/.ckptsync-0123456789abcdef.part"
    draft.write_text("half")
    other = store / "other/checkpoint-1/stray.bin"
    other.write_text("x")
    for path in (stray, draft, other):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    said = cli("gc", "--orphans", "--dry-run").out
    assert "orphaned: run/checkpoint-1/stray.bin, 1 B" in said
    assert stray.exists()
    cli("gc", "--orphans", "--run", "run")
    assert [path.exists() for path in (stray, draft, other)] == [False, True, True]
    said = cli("gc", "--orphans").out
    assert "deleted orphaned file: run/checkpoint-2/.ckptsync-" in said
    assert not draft.exists()
    assert (store / "run/checkpoint-1/a.bin").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no rule is given"),
        (["--keep-last", "x"], "--keep-last"),
        (["--keep-best", "loss"], "not a metric and a number"),
        (["--grace", "soon", "--keep-last", "1"], "--grace"),
        (["--max-size", "9" * 400 + "TB"], "too large"),
        (["--keep-last", "1", "--run", ".."], "not a name that a run can have"),
        (["--keep-last", "1", "--run", "run/"], "not a name that a run can have"),
        (["--keep-last", "1", "--run", "nosuch"], "run 'nosuch' not found"),
    ],
)
def test_a_wrong_rule_is_refused(store: Path, words: list[str], told: str, cli: Cli) -> None:
    assert told in cli("gc", *words, code=2).err
