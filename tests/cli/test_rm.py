"""``ckptsync rm`` as transcripts: what is deleted, what is refused, and who is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.main import main
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.opening import create_store, open_store
from tests.support.retention_stores import FIRST, fill
from tests.support.terminal import on_terminal, read_until
from tests.support.verified_stores import put

OLD = "run/checkpoint-1"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = create_store(str(tmp_path / "store"))
    for n in (1, 2):
        fill(made, f"checkpoint-{n}", FIRST + n * 3600)
    return tmp_path / "store"


def tree(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def rm(store: Path, *words: str) -> int:
    return main(["rm", *words, "--store", str(store)])


def test_a_checkpoint_is_deleted_and_leaves_a_tombstone_alone(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(store)
    assert rm(store, OLD, "--dry-run") == 0
    assert f"would be deleted: {OLD} (VERIFIED)" in capsys.readouterr().out
    assert tree(store) == before
    assert rm(store, OLD, "--yes", "--reason", "diverged") == 0
    assert f"deleted: {OLD}: " in capsys.readouterr().out
    left = {name for name in tree(store) if "checkpoint-1" in name}
    assert left
    assert all("tombstone" in name for name in left)
    assert {name for name in before if "checkpoint-2" in name} <= tree(store)
    assert rm(store, OLD, "--yes") == 2
    told = capsys.readouterr().err
    assert "was deleted" in told
    assert "deleted by hand: diverged" in told
    assert main(["pull", OLD, str(store.parent / "out"), "--store", str(store)]) == 2


def test_the_last_that_is_verified_and_what_is_kept_are_refused_with_the_reason(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keep", OLD, "--reason", "the paper", "--store", str(store)]) == 0
    before = tree(store)
    assert rm(store, OLD, "--yes") == 2
    told = capsys.readouterr().err
    assert "is not deleted: kept by hand: the paper" in told
    assert "ckptsync keep --release run/checkpoint-1" in told
    assert main(["keep", "--list", "--store", str(store)]) == 0
    assert "the paper" in capsys.readouterr().out
    assert main(["keep", OLD, "--release", "--store", str(store)]) == 0
    assert rm(store, OLD, "--yes") == 0
    assert rm(store, "run/checkpoint-2", "--yes", "--json") == 2
    error = json.loads(capsys.readouterr().err)
    assert "no other checkpoint of the run is verified" in error["error"]
    assert {name for name in before if "checkpoint-2" in name} <= tree(store)


def test_a_name_that_is_not_there_asks_what_was_meant(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, meant in (
        (["run/checkpoint-11"], "checkpoint-1"),
        (["rnu/checkpoint-1"], "run"),
        (["run"], "ckptsync ls"),
        ([], "ckptsync ls"),
    ):
        assert rm(store, *words, "--yes") == 2
        assert meant in capsys.readouterr().err


def test_a_removal_that_was_killed_is_finished_by_the_same_command(store: Path) -> None:
    opened = open_store(str(store))
    seen = next(s for s in read_state(opened).locations if s.location == "checkpoint-1")
    manifests = tuple(stored.name for stored in seen.manifests)
    put(opened, Tombstone("run", "checkpoint-1", "checkpoint-1", 0, manifests, "by hand"))
    assert rm(store, OLD, "--yes") == 0
    assert all("tombstone" in name for name in tree(store) if "checkpoint-1" in name)


@pytest.mark.parametrize(("answer", "code"), [("yes\n", 0), ("no\n", 2), ("\n", 2)])
def test_a_person_is_asked_and_a_script_says_yes(store: Path, answer: str, code: int) -> None:
    command = [sys.executable, "-m", "ckptsync", "rm", OLD, "--store", str(store)]
    before = tree(store)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, b"give --yes" in done.stderr) == (2, True)
    assert tree(store) == before
    with on_terminal(command, ["stdin", "stderr"], stdout=subprocess.DEVNULL) as (run, leader):
        asked = read_until(leader, lambda asked: b"[yes/no]" in asked)
        assert f"delete {OLD} (VERIFIED)".encode() in asked
        os.write(leader, answer.encode())
        assert run.wait(60) == code
    assert (tree(store) == before) == (code == 2)
