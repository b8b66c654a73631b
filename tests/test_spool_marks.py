from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.spool import marks
from ckptsync.spool.marks import Begun, Commit, RankMark, Took

BEGUN = Begun("t", 1, 2, 2, "host", 7, "99", "boot pid", 5.5, "transformers 5", {"torch": "2"}, "p1", "m", 6.0, 7.0)
MARK = RankMark("t", "s", "checkpoint-1", 1, 0, 2, 2, "host", 7, 5.5)
COMMIT = Commit("t", "s", "checkpoint-1", 1, 2, (0, 1), "host", "transformers 5", 5.5, {"a/b.bin": (3, 4)})


def here(**changes: object) -> Begun:
    """The process of this test, as a hook would tell it."""
    pid = os.getpid()
    mine = Begun("t", 0, 1, 1, os.uname().nodename, pid, marks.began(pid), marks.boot(), 1.0, machine=marks.machine())
    return dataclasses.replace(mine, **changes)  # type: ignore[arg-type]


def test_what_is_written_is_read_again(spool: Path) -> None:
    marks.write_mark(marks.begun_path(spool, "p1"), BEGUN)
    marks.write_mark(marks.save_folder(spool, "checkpoint-1", "s") / "rank-0.json", MARK)
    marks.write_mark(spool / "pins" / "checkpoint-1.0" / "commit.json", COMMIT)
    marks.write_mark(spool / "pins" / "checkpoint-1.0" / "took.json", Took(1, 2, 3, "tf", "s"))
    assert marks.begun(spool) == (BEGUN,)
    assert marks.marks(spool, "checkpoint-1") == (MARK,)
    assert marks.commit_of(spool / "pins" / "checkpoint-1.0") == COMMIT
    assert marks.took_of(spool / "pins" / "checkpoint-1.0") == Took(1, 2, 3, "tf", "s")


def test_marks_of_another_checkpoint_are_not_told(spool: Path) -> None:
    marks.write_mark(marks.save_folder(spool, "checkpoint-10", "s") / "rank-0.json", MARK)
    assert marks.marks(spool, "checkpoint-1") == ()


def test_where_nothing_was_written_there_is_nothing(spool: Path) -> None:
    assert marks.begun(spool) == ()
    assert marks.marks(spool, "checkpoint-1") == ()
    assert marks.commit_of(spool) is None
    assert marks.took_of(spool) == Took()
    assert marks.said(spool) == ()


def test_a_mark_that_cannot_be_written_leaves_nothing_behind(spool: Path) -> None:
    (spool / "commit.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        marks.write_mark(spool / "commit.json", COMMIT)
    assert [p.name for p in spool.iterdir()] == ["commit.json"]


def test_a_save_has_an_id_of_its_own_each_time() -> None:
    ids = {marks.save_id(t, c, n) for t in ("t", "u") for c in ("checkpoint-1", "checkpoint-2") for n in (0, 1)}
    assert len(ids) == 8
    assert all(len(i) == 16 for i in ids)


def test_a_process_runs_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = here(pid=child.pid, began=marks.began(child.pid))
    assert marks.is_running(told) is True
    child.communicate(b"\n")
    assert marks.is_running(told) is False


def test_a_dead_process_that_its_parent_has_not_noticed_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    told = here(pid=child.pid, began=marks.began(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").exists()
    assert marks.is_running(told) is False
    child.wait()


def test_another_process_with_the_same_number_is_another_process() -> None:
    assert marks.is_running(here(began="1")) is False


def test_a_process_that_says_it_has_left_writes_no_more() -> None:
    assert marks.is_running(here()) is True
    assert marks.is_running(here(left=2.0)) is False


def test_a_process_before_the_last_boot_has_ended() -> None:
    before = here(boot="another-boot " + marks.boot().partition(" ")[2], machine=marks.machine())
    assert marks.is_running(before) is (False if marks.machine() else None)


def test_nobody_can_tell_of_another_machine_or_container() -> None:
    assert marks.is_running(here(boot="another-boot pid:[1]", host="elsewhere")) is None
    assert marks.is_running(here(boot="another-boot pid:[1]", machine="elsewhere")) is None
    assert marks.is_running(here(boot=marks.boot().partition(" ")[0] + " pid:[1]")) is None


def test_what_a_hook_says_is_a_line_each_and_never_much(spool: Path) -> None:
    for n in range(100):
        marks.say(spool, f"{n}: two\nlines " + "x" * 3000)
    assert [line.split(":")[0] for line in marks.said(spool)] == [str(n) for n in range(90, 100)]
    assert sum(p.stat().st_size for p in spool.iterdir()) < 200_000


def test_a_name_that_is_no_utf_8_is_said_all_the_same(spool: Path) -> None:
    marks.say(spool, os.fsdecode(b"checkpoint-4/caf\xe9: gone"))
    assert marks.said(spool) == ("checkpoint-4/caf\\udce9: gone",)
