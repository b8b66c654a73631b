from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
from pathlib import Path

from ckptsync.hooks import here as whereabouts
from ckptsync.spool import marks
from tests.hooking import here


def test_who_begins_says_so_in_the_spool(tmp_path: Path) -> None:
    mine = whereabouts.introduce(here(tmp_path, 1, 4), {"torch": "2"})
    assert marks.begun(tmp_path / "_ckptsync") == (mine,)
    assert (mine.rank, mine.world, mine.train, mine.facts["torch"]) == (1, 4, "", "2")
    assert marks.is_running(mine)


def test_a_copy_of_a_run_is_not_the_same_location(tmp_path: Path) -> None:
    """A spool that somebody copied to another node has introductions in it, of processes before."""
    before = whereabouts.introduce(here(tmp_path), {})
    mine = whereabouts.introduce(here(tmp_path), {})
    words = [f"{mine.process} {mine.host}", f"elsewhere {before.host}"]
    assert whereabouts.neighbours(tmp_path / "_ckptsync", mine, words) == (0,)


def test_a_shared_directory_is_one_location_whatever_the_hosts(tmp_path: Path) -> None:
    mine = whereabouts.introduce(here(tmp_path, 0, 2), {})
    other = whereabouts.introduce(here(tmp_path, 1, 2), {})
    words = [f"{mine.process} a", f"{other.process} b"]
    assert whereabouts.neighbours(tmp_path / "_ckptsync", mine, words) == (0, 1)


def test_where_introductions_were_deleted_the_host_decides(tmp_path: Path) -> None:
    mine = whereabouts.introduce(here(tmp_path, 0, 3), {})
    marks.begun_path(tmp_path / "_ckptsync", mine.process).unlink()
    words = [f"{mine.process} {mine.host}", f"x {mine.host}", "y elsewhere"]
    assert whereabouts.neighbours(tmp_path / "_ckptsync", mine, words) == (0, 1)


def test_marks_are_kept_as_long_as_the_save_is_there_or_pinned(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    for checkpoint in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint_4", "run-0.checkpoint-1", "run-0.checkpoint-2"):
        marks.save_folder(spool, checkpoint, "s").mkdir(parents=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    (tmp_path / "run-0" / "checkpoint-1").mkdir(parents=True)
    (spool / "pins" / "checkpoint-2.0").mkdir(parents=True)
    whereabouts.forget_saves(spool)
    assert sorted(p.name for p in (spool / "saves").iterdir()) == [
        "checkpoint-1@s",
        "checkpoint-2@s",
        "checkpoint_4@s",
        "run-0.checkpoint-1@s",
    ]


def test_a_process_of_another_machine_is_believed_for_a_month(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    mine = whereabouts.introduce(here(tmp_path), {})
    far = dataclasses.replace(mine, boot="another", host="elsewhere", process="far")
    marks.write_mark(marks.begun_path(spool, "far"), far)
    marks.write_mark(marks.begun_path(spool, "old"), dataclasses.replace(far, process="old", at=far.at - 31 * 24 * 3600))
    whereabouts.forget_the_dead(spool)
    assert {b.process for b in marks.begun(spool)} == {mine.process, "far"}


def test_what_the_killed_have_half_copied_goes_and_what_the_living_copy_stays(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    mine = whereabouts.introduce(here(tmp_path), {})
    gone = subprocess.Popen(["true"])
    gone.wait()
    killed, left = (dataclasses.replace(mine, process=name) for name in ("killed", "left"))
    marks.write_mark(marks.begun_path(spool, "killed"), dataclasses.replace(killed, pid=gone.pid))
    marks.write_mark(
        marks.begun_path(spool, "left"), dataclasses.replace(left, left=1.0, pid=os.getppid(), began=marks.began(os.getppid()))
    )
    for pid in (gone.pid, os.getpid(), os.getppid()):
        (spool / "pins" / f".new-hook-{pid}-0a-checkpoint-1" / "files").mkdir(parents=True)
    (spool / "pins" / f".gone-hook-{gone.pid}-checkpoint-1.0").mkdir()
    whereabouts.forget_the_dead(spool)
    for thread in threading.enumerate():
        if thread.name == "ckptsync-remove":
            thread.join()
    assert {p.name.split("-")[2] for p in (spool / "pins").iterdir()} == {str(os.getpid()), str(os.getppid())}
