"""``ckptsync rm`` as transcripts: what is deleted, what is refused, and who is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.opening import create_store, open_store
from tests.support.command_line import Cli
from tests.support.filled_stores import put
from tests.support.retention_stores import FIRST, fill
from tests.support.terminal import on_terminal, read_until

OLD = "run/checkpoint-1"


@pytest.fixture
def store(named: Path) -> Path:
    made = create_store(str(named))
    for n in (1, 2):
        fill(made, f"checkpoint-{n}", FIRST + n * 3600)
    return named


def tree(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def test_a_checkpoint_is_deleted_and_leaves_a_tombstone_alone(store: Path, cli: Cli) -> None:
    before = tree(store)
    assert f"would be deleted: {OLD} (VERIFIED)" in cli("rm", OLD, "--dry-run").out
    assert tree(store) == before
    assert f"deleted: {OLD}: " in cli("rm", OLD, "--yes", "--reason", "diverged \udce9").out
    left = {name for name in tree(store) if "checkpoint-1" in name}
    assert left
    assert all("tombstone" in name for name in left)
    assert {name for name in before if "checkpoint-2" in name} <= tree(store)
    told = cli("rm", OLD, "--yes", code=2).err
    assert "was deleted" in told
    assert "deleted by hand: diverged" in told
    cli("pull", OLD, store.parent / "out", code=2)


def test_the_last_verified_and_what_is_kept_are_refused(store: Path, cli: Cli) -> None:
    cli("keep", OLD, "--reason", "the paper \udce9")  # of a shell that is not UTF-8
    before = tree(store)
    told = cli("rm", OLD, "--yes", code=2).err
    assert "is not deleted: kept by hand: the paper" in told
    assert "ckptsync keep --release run/checkpoint-1" in told
    assert "the paper" in cli("keep", "--list").out
    cli("keep", OLD, "--release")
    cli("rm", OLD, "--yes")
    error = cli("rm", "run/checkpoint-2", "--yes", "--json", code=2).json["error"]
    assert "no other checkpoint of the run is verified" in error
    assert {name for name in before if "checkpoint-2" in name} <= tree(store)


def test_a_name_that_is_not_there_asks_what_was_meant(store: Path, cli: Cli) -> None:
    for words, meant in (
        (["run/checkpoint-11"], "checkpoint-1"),
        (["rnu/checkpoint-1"], "run"),
        (["run"], "run: expected RUN/CHECKPOINT"),
        ([], "no RUN/CHECKPOINT is named"),
    ):
        assert meant in cli("rm", *words, "--yes", code=2).err


def test_a_removal_that_was_killed_is_finished_by_the_same_command(store: Path, cli: Cli) -> None:
    opened = open_store(str(store))
    seen = next(s for s in read_state(opened).locations if s.location == "checkpoint-1")
    manifests = tuple(stored.name for stored in seen.manifests)
    put(opened, Tombstone("run", "checkpoint-1", "checkpoint-1", 0, manifests, "by hand"))
    cli("rm", OLD, "--yes")
    assert all("tombstone" in name for name in tree(store) if "checkpoint-1" in name)


def test_a_script_has_to_say_yes(store: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(store)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert "give --yes" in cli("rm", OLD, code=2).err
    assert tree(store) == before


@pytest.mark.parametrize(("answer", "code"), [("yes\n", 0), ("\n", 2)])
def test_a_person_is_asked(store: Path, answer: str, code: int) -> None:
    command, before = [sys.executable, "-m", "ckptsync", "rm", OLD], tree(store)
    with on_terminal(command, ["stdin", "stderr"], stdout=subprocess.DEVNULL) as (run, leader):
        asked = read_until(leader, lambda asked: b"[yes/no]" in asked)
        assert f"delete {OLD} (VERIFIED)".encode() in asked
        os.write(leader, answer.encode())
        assert run.wait(60) == code
    assert (tree(store) == before) == (code == 2)
