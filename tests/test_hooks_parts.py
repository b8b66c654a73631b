from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptsync.hooks import parts
from ckptsync.spool import marks
from ckptsync.spool.marks import Begun

BEGUN = Begun("t", 0, 2, 2, "h", 1, "1", "b", 100.0, "torch 2")


def test_a_mark_says_whose_part_of_which_save_is_written(spool: Path) -> None:
    made = parts.mark(spool, BEGUN, "s", "checkpoint-4", 4)
    assert marks.marks(spool, "checkpoint-4") == (made,)
    assert (made.train, made.save, made.step, made.rank, made.local_world) == ("t", "s", 4, 0, 2)


def test_a_mark_is_completed_by_what_was_learnt_later(spool: Path) -> None:
    made = parts.mark(spool, replace(BEGUN, local_world=0), "s", "checkpoint-4", 4)
    parts.write(spool, replace(made, local_world=2))
    assert marks.marks(spool, "checkpoint-4") == (replace(made, local_world=2),)


def test_of_all_ranks_that_write_here_one_is_the_last(spool: Path) -> None:
    first = parts.mark(spool, BEGUN, "s", "checkpoint-4", 4)
    assert not parts.is_last(spool, first, (0, 1))
    second = parts.mark(spool, replace(BEGUN, rank=1), "s", "checkpoint-4", 4)
    assert [parts.is_last(spool, mark, (0, 1)) for mark in (first, second)] == [True, False]


def test_a_commit_has_the_save_and_the_ranks_and_no_files_yet() -> None:
    commit = parts.commit(BEGUN, "", "checkpoint-4", 4, (0, 1))
    assert (commit.save, commit.ranks, commit.world, commit.trainer, commit.files) == ("", (0, 1), 2, "torch 2", {})
