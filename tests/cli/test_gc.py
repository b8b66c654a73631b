"""``ckptsync gc`` and ``keep`` as transcripts, on a real directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.stores.opening import create_store
from tests.support.retention_stores import FIRST, fill

CONFIG = (
    "roles: [head]\n"
    "store: {{url: {url}}}\n"
    "retention: {{keep_last: 1, grace: 1h, runs: {{other: {{keep_last: 3}}}}}}\n"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = create_store(str(tmp_path / "store"))
    for n in range(1, 4):
        fill(made, f"checkpoint-{n}", FIRST + n * 3600)
    fill(made, "checkpoint-1", run="other")
    return tmp_path / "store"


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_a_dry_run_says_what_would_go_and_why_and_writes_nothing(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(store)
    assert main(["gc", "--store", str(store), "--keep-last", "2", "--run", "run", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["RUN", "CHECKPOINT", "STATUS", "SIZE", "DECISION", "REASON"]
    assert lines[3].split(maxsplit=6) == [
        "run",
        "checkpoint-1",
        "VERIFIED",
        lines[3].split()[3],
        "B",
        "drop",
        "not one of the newest 2",
    ]
    assert lines[-2].startswith("would mark run/checkpoint-1: ")
    assert lines[-1].startswith("3 checkpoints; 1 to mark (")
    assert tree(store) == before


def test_what_is_marked_is_removed_when_its_grace_is_over(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "head.yaml"
    config.write_text(CONFIG.format(url=store))
    assert main(["gc", "-c", str(config), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(d["run"], d["location"], d["outcome"]) for d in told["done"]] == [
        ("run", "checkpoint-2", "marked"),
        ("run", "checkpoint-1", "marked"),
    ]
    age(store / "run/.ckptsync/checkpoint-1", 3601)
    assert main(["gc", "-c", str(config)]) == 0
    out = capsys.readouterr().out
    assert "removed: run/checkpoint-1" in out
    assert "drop (in " in out, "the other has most of its hour before it"
    assert not (store / "run/checkpoint-1").exists()
    assert (store / "run/checkpoint-2").exists()


def age(records: Path, seconds: float) -> None:
    """A store's clock is its file system's."""
    for path in records.glob("tombstone-*"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_without_a_grace_the_next_one_removes_what_was_marked(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a configuration may say, too: a full disk waits for nobody."""
    for wanted in ("2 marked", "2 removed"):
        assert main(["gc", "--store", str(store), "--keep-last", "1", "--grace", "0s"]) == 0
        assert wanted in capsys.readouterr().out
    assert not (store / "run/checkpoint-1").exists()
    assert (store / "run/checkpoint-3").exists()


def test_what_is_kept_by_hand_stays_and_says_so(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, told in (
        ("", "kept from now on"),
        ("", "was kept already"),
        ("--release", "released"),
        ("--release", "was not kept"),
    ):
        assert main(["keep", "run/checkpoint-1", "--store", str(store), *line.split()]) == 0
        assert told in capsys.readouterr().out
    main(["keep", "run/checkpoint-1", "--store", str(store), "--reason", "the paper"])
    assert main(["gc", "--store", str(store), "--keep-last", "1", "--run", "run"]) == 0
    assert "kept by hand: the paper" in capsys.readouterr().out


def test_a_link_in_a_location_is_not_followed(store: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "a.bin").write_text("mine")
    (store / "run/checkpoint-1/dir").symlink_to(precious)
    (store / "run/checkpoint-1/file").symlink_to(precious / "a.bin")
    main(["gc", "--store", str(store), "--keep-last", "1"])
    age(store / "run/.ckptsync/checkpoint-1", 10)
    main(["gc", "--store", str(store), "--keep-last", "1", "--grace", "1s"])
    assert not (store / "run/checkpoint-1/a.bin").exists()
    assert (precious / "a.bin").read_text() == "mine"


def test_orphaned_files_are_shown_and_deleted_when_asked_for(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = store / "run/checkpoint-1/stray.bin"
    stray.write_text("x")
    draft = store / "run/checkpoint-2/.ckptsync-0123456789abcdef.part"
    draft.write_text("half")
    for path in (stray, draft):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    assert main(["gc", "--store", str(store), "--orphans", "--dry-run"]) == 0
    assert "orphaned: run/checkpoint-1/stray.bin, 1 B" in capsys.readouterr().out
    assert stray.exists()
    assert main(["gc", "--store", str(store), "--orphans"]) == 0
    assert "deleted orphaned file: run/checkpoint-2/.ckptsync-" in capsys.readouterr().out
    assert not stray.exists()
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
def test_what_cannot_be_meant_is_refused(
    store: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", "--store", str(store), *words]) == 2
    assert told in capsys.readouterr().err
