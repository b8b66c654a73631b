"""What training processes and the worker write for each other."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.spool import markers
from ckptsync.spool.markers import Commit, PinNotes, RankMark, TrainingProcess, read_marker

BEGUN = TrainingProcess(
    "t",
    1,
    2,
    2,
    "host",
    7,
    "99",
    "boot pid",
    5.5,
    "transformers 5",
    {"torch": "2"},
    "p1",
    "m",
    6.0,
    7.0,
)
MARK = RankMark("t", "s", "checkpoint-1", 1, 0, 2, 2, "host", 7, 5.5)
COMMIT = Commit(
    "t", "s", "checkpoint-1", 1, 2, (0, 1), "host", "transformers 5", 5.5, {"a/b.bin": (3, 4)}
)


def make_process(**changes: object) -> TrainingProcess:
    """The process of this test, as a hook would tell it."""
    pid = os.getpid()
    mine = TrainingProcess(
        "t",
        0,
        1,
        1,
        os.uname().nodename,
        pid,
        markers.start_time(pid),
        markers.boot_id(),
        1.0,
        machine=markers.machine_id(),
    )
    return dataclasses.replace(mine, **changes)  # type: ignore[arg-type]


def test_what_is_written_is_read_again(spool: Path) -> None:
    markers.write_mark(markers.process_path(spool, "p1"), BEGUN)
    for name in ("checkpoint-1", "checkpoint-10"):
        markers.write_mark(markers.save_folder(spool, name, "s") / "rank-0.json", MARK)
    markers.write_mark(spool / "pins" / "checkpoint-1.0" / "commit.json", COMMIT)
    markers.write_mark(spool / "pins" / "checkpoint-1.0" / "notes.json", PinNotes(1, 2, 3, "s"))
    assert markers.list_training_processes(spool) == (BEGUN,)
    assert markers.list_rank_marks(spool, "checkpoint-1") == (MARK,)
    pin = spool / "pins" / "checkpoint-1.0"
    assert markers.read_marker(pin / markers.COMMIT, Commit) == COMMIT
    notes = markers.read_marker(pin / markers.NOTES, PinNotes)
    assert notes == PinNotes(1, 2, 3, "s")


def test_a_mark_that_cannot_be_written_leaves_nothing_behind(spool: Path) -> None:
    (spool / "commit.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        markers.write_mark(spool / "commit.json", COMMIT)
    assert [p.name for p in spool.iterdir()] == ["commit.json"]


def test_a_save_has_an_id_of_its_own_each_time() -> None:
    ids = {
        markers.save_id(t, c, n)
        for t in ("t", "u")
        for c in ("checkpoint-1", "checkpoint-2")
        for n in (0, 1)
    }
    assert len(ids) == 8
    assert all(len(i) == 16 for i in ids)


def test_a_process_runs_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = make_process(pid=child.pid, began=markers.start_time(child.pid))
    assert markers.is_training(told) is True
    child.communicate(b"\n")
    assert markers.is_training(told) is False


def test_a_dead_process_that_its_parent_has_not_noticed_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    told = make_process(pid=child.pid, began=markers.start_time(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").exists()
    assert markers.is_training(told) is False
    child.wait()


def test_another_process_with_the_same_number_is_another_process() -> None:
    assert markers.is_training(make_process(began="1")) is False
    assert markers.is_training(make_process(left=2.0)) is False, "nor is one that has left"


def test_a_process_of_which_nothing_is_known_does_not_train_for_ever() -> None:
    assert markers.is_training(make_process(pid=999_999_999, began="")) is False


def test_a_process_before_the_last_boot_has_ended() -> None:
    before = make_process(
        boot="another-boot " + markers.boot_id().partition(" ")[2], machine=markers.machine_id()
    )
    assert markers.is_training(before) is (False if markers.machine_id() else None)


def test_nobody_can_tell_of_another_machine_or_container() -> None:
    assert markers.is_training(make_process(boot="another-boot pid:[1]", host="elsewhere")) is None
    assert (
        markers.is_training(make_process(boot="another-boot pid:[1]", machine="elsewhere")) is None
    )
    assert (
        markers.is_training(make_process(boot=markers.boot_id().partition(" ")[0] + " pid:[1]"))
        is None
    )


def test_what_a_hook_says_is_a_line_each_and_never_much(spool: Path) -> None:
    for n in range(100):
        markers.write_log(spool, f"{n}: two\nlines " + "x" * 3000)
    assert [line.split(":")[0] for line in markers.read_log(spool)] == [
        str(n) for n in range(90, 100)
    ]
    assert sum(p.stat().st_size for p in spool.iterdir()) < 200_000


def test_a_name_that_is_no_utf_8_is_said_all_the_same(spool: Path) -> None:
    markers.write_log(spool, os.fsdecode(b"checkpoint-4/caf\xe9: gone"))
    assert markers.read_log(spool) == ("checkpoint-4/caf\\udce9: gone",)


def told(**changes: object) -> bytes:
    """A commit's file with other values."""
    return json.dumps(dataclasses.asdict(COMMIT) | changes).encode()


BROKEN = {
    "nothing": b"",
    "half": told()[:-9],
    "a list": b"[1]",
    "null": b"null",
    "not text": b"\xff\xfe{}",
    "a key that is missing": b'{"train": "t"}',
    "a word for a number": told(step="1"),
    "a truth for a number": told(step=True),
    "a number for a word": told(host=1),
    "files that are no pairs": told(files={"a": [1]}),
    "files that are a list": told(files=[]),
    "very deep": b"[" * 100_000,
    "all brackets": b"[" + b"[]," * 1_000_000 + b"[]]",
    "a number of 400 digits": told().replace(b'"at": ', b'"at": ' + b"9" * 400),
    "a number of 5000 digits": told().replace(b'"at": ', b'"at": ' + b"9" * 5000),
    "a number that no record holds": told(step=2**63),
    "a time that is none": told(at=float("nan")),
    "a word that is no UTF-8": told(host="\ud800"),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_no_file(spool: Path, content: bytes) -> None:
    (spool / "commit.json").write_bytes(content)
    assert read_marker(spool / "commit.json", Commit) is None


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "device", "huge"])
def test_what_is_no_small_file_is_no_file_and_nobody_waits_for_it(spool: Path, kind: str) -> None:
    path = spool / "commit.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (spool / "real.json").write_bytes(told())
        path.symlink_to("real.json")
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    assert read_marker(path, Commit) is None


def test_a_key_of_a_later_version_is_ignored(spool: Path) -> None:
    (spool / "commit.json").write_bytes(told(later=[1]))
    assert read_marker(spool / "commit.json", Commit) == COMMIT


def test_the_ranks_at_a_time_are_those_of_the_last_training_then(spool: Path) -> None:
    for name, world, at, left in (("long", 8, 10.0, 0.0), ("short", 4, 12.0, 14.0)):
        process = make_process(world=world, at=at, left=left)
        markers.write_mark(markers.process_path(spool, name), process)
    found = {at: markers.count_ranks_at(spool, at) for at in (9.0, 11.0, 13.0, 14.0, 15.0)}
    assert found == {9.0: None, 11.0: 8, 13.0: 4, 14.0: 4, 15.0: 8}
