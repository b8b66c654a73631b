"""What the dead left half done goes, what lives is let be, and no files that may be the last are lost."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from ckptsync.spool.pins import claim, pins
from ckptsync.spool.sweeping import sweep, tidy
from tests.hook_pins import pinned

LATER = 7 * 3600.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint-4"
    root.mkdir()
    (root / "a").write_bytes(b"aaa")
    return root


def left(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "_ckptsync" / "pins").iterdir())


def test_what_a_killed_node_left_is_swept_and_others_are_let_be_until_they_are_long_dead(tmp_path: Path) -> None:
    names = [".gone-hook-7-checkpoint-4.0", ".gone-n0-checkpoint-4.0", ".new-hook-7.0a-checkpoint-4", ".new-n1-checkpoint-4"]
    for name in (*names, ".new-n0-checkpoint-4", "checkpoint-5.0"):
        (tmp_path / "_ckptsync" / "pins" / name / "files").mkdir(parents=True)
    sweep(tmp_path, "n0")
    assert left(tmp_path) == [
        ".gone-hook-7-checkpoint-4.0",
        ".new-hook-7.0a-checkpoint-4",
        ".new-n1-checkpoint-4",
        "checkpoint-5.0",
    ]
    tidy(tmp_path, time.time() + 5 * 3600)
    assert len(left(tmp_path)) == 4
    tidy(tmp_path, time.time() + LATER)
    assert left(tmp_path) == ["checkpoint-5.0"]


def test_what_somebody_still_copies_into_is_let_be(tmp_path: Path) -> None:
    growing = tmp_path / "_ckptsync" / "pins" / ".new-hook-7.0a-checkpoint-4" / "files" / "a"
    growing.parent.mkdir(parents=True)
    growing.touch()
    os.utime(growing, (time.time() + LATER,) * 2)
    tidy(tmp_path, time.time() + LATER)
    assert growing.exists()


def test_a_claim_that_was_cut_short_is_finished_for_its_files_may_be_the_last(source: Path) -> None:
    pin = pinned(source)
    pin.path.rename(pin.path.with_name(".claim-n1@checkpoint-4.0"))
    shutil.rmtree(source)
    sweep(source.parent, "n1")
    assert [(p.node, p.files) for p in pins(source.parent)] == [("n1", pin.files)]


def test_the_claim_of_a_node_that_never_came_back_is_anybodys_to_claim_again(source: Path) -> None:
    pin = pinned(source)
    for each in (pin.path, *pin.path.rglob("*")):
        os.utime(each, (1, 1))  # it was pinned long ago
    (pin,) = pins(source.parent)
    pin.path.rename(pin.path.with_name(".claim-n-1@checkpoint-4.0"))
    shutil.rmtree(source)
    sweep(source.parent, "n2")
    assert left(source.parent) == [".claim-n-1@checkpoint-4.0"], "he may be about to finish it"
    tidy(source.parent, time.time() + LATER)
    (back,) = pins(source.parent)
    assert (back.checkpoint, back.node, back.files) == ("checkpoint-4", "n0", pin.files)
    mine = claim(back, "n2")
    assert mine is not None
    assert (mine.node, mine.files) == ("n2", pin.files)


def test_what_cannot_be_removed_keeps_nothing_else_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(2):
        (tmp_path / "_ckptsync" / "pins" / f".new-n{n}-checkpoint-4").mkdir(parents=True)

    def mine(path: Path) -> None:
        if "-n0-" in path.name:
            raise PermissionError(errno.EACCES, "root's")
        path.rmdir()

    monkeypatch.setattr("ckptsync.spool.sweeping.remove", mine)
    tidy(tmp_path, time.time() + LATER)
    assert left(tmp_path) == [".new-n0-checkpoint-4"]
