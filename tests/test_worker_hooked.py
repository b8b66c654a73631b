"""What the marks of training processes say of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.spool.marks import Begun, Commit, RankMark, begun_path, save_folder, write_mark
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat
from ckptsync.worker.hooked import Hooked, read_hooked, word

S = 10**9
BEGUN = Begun("t", 0, 2, 2, "h", 1, "1", "b", 100.0)
TRAINER = replace(BEGUN, trainer="transformers 5.23.0")
MARK = RankMark("t", "s0", "checkpoint-4", 4, 0, 2, 2, "h", 1, 130.0)
BOTH = (MARK, replace(MARK, rank=1, at=131.0))
PIN = Pin("checkpoint-4", 0, "", 0, Path("pin"), (Stat("a", 3, 110 * S, 1, 1), Stat("b", 4, 120 * S, 2, 1)))


def said(
    *marks: RankMark, begun: Begun = BEGUN, pin: Pin | None = PIN, name: str = "checkpoint-4", alive: bool | None = True
) -> str:
    return word(Hooked((begun,), {"checkpoint-4": marks}), pin, name, lambda _: alive)


def test_where_no_hook_ever_was_nothing_is_said(tmp_path: Path) -> None:
    assert read_hooked(tmp_path, ("checkpoint-4",)) == Hooked()
    assert word(Hooked(), PIN, "checkpoint-4", lambda _: True) == ""
    assert said(pin=None) == ""


def test_what_lies_in_the_spool_is_read_for_the_checkpoints_asked_for(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    write_mark(begun_path(spool, "p"), BEGUN)
    for mark in (*BOTH, replace(MARK, checkpoint="checkpoint-8")):
        write_mark(save_folder(spool, mark.checkpoint, mark.save) / f"rank-{mark.rank}.json", mark)
    assert read_hooked(tmp_path, ("checkpoint-4",)) == Hooked((replace(BEGUN, process="p"),), {"checkpoint-4": BOTH})


def test_a_commit_counts_as_long_as_the_files_are_what_it_says() -> None:
    commit = Commit("t", "s0", "checkpoint-4", 4, 2, (0, 1), "h", "", 131.0, {"a": (3, 110 * S), "b": (4, 120 * S)})
    assert said(pin=replace(PIN, commit=commit)) == "committed"
    assert said(pin=replace(PIN, commit=commit, files=PIN.files[:1])) == "training"  # somebody deleted one
    written_again = (PIN.files[0], replace(PIN.files[1], mtime=125 * S))
    assert said(pin=replace(PIN, commit=commit, files=written_again)) == "training"


def test_a_living_training_has_in_hand_what_was_written_since_it_began() -> None:
    assert said() == "training"
    assert said(alive=None) == "training"
    assert said(alive=False) == ""
    assert said(begun=replace(BEGUN, at=120.5)) == ""  # a save of the training before it
    assert said(begun=replace(BEGUN, ended=140.0)) == ""
    assert said(begun=replace(BEGUN, marks="some")) == ""  # it may never mark this one


def test_marks_of_all_ranks_that_write_here_are_needed() -> None:
    assert said(MARK) == "training"
    assert said(*BOTH) == "marked"
    assert said(*BOTH, alive=False) == "marked"
    assert said(MARK, replace(MARK, at=131.0)) == "training"  # one rank twice
    assert said(replace(MARK, local_world=0)) == "training"  # nobody knew how many there are


def test_marks_of_an_older_save_say_nothing_of_one_that_is_being_written() -> None:
    again = replace(PIN, files=(*PIN.files, Stat("c", 1, 140 * S, 3, 1)))
    assert said(*BOTH, pin=again) == "training"
    assert said(*BOTH, replace(MARK, save="s1", at=150.0), pin=again) == "training"
    assert said(*BOTH, *(replace(m, save="s1", at=m.at + 20) for m in BOTH), pin=again) == "marked"


@pytest.mark.parametrize(
    ("alive", "left", "expected"),
    [(True, 0, "training"), (True, 140.0, "training"), (False, 140.0, "marked"), (False, 0, "killed")],
)
def test_the_final_model_is_there_when_the_processes_have_left(*, alive: bool, left: float, expected: str) -> None:
    assert said(begun=replace(TRAINER, ended=105.0, left=left), name="final", alive=alive) == expected
    assert said(begun=replace(BEGUN, at=125.0, left=left), name="final", alive=alive) == ""  # it was there before


def test_of_a_training_that_was_killed_and_begun_again_the_last_processes_tell_of_the_final_model() -> None:
    assert said(begun=BEGUN, name="final", alive=False) == ""  # of a script with `mark_saved`
    again = [replace(TRAINER, train="t2", rank=rank, at=105.0 + rank, left=140.0) for rank in (0, 1)]
    assert word(Hooked((BEGUN, *again), {}), PIN, "final", lambda _: False) == "marked"
    assert word(Hooked((BEGUN, again[0], replace(again[1], left=0.0)), {}), PIN, "final", lambda _: False) == "killed"
