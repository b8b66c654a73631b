"""The killer of commands sees what is wrong; `make kill` kills real processes again and again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.campaigns import kill
from tests.campaigns.kill import CHANGING, can_trap, traps
from tests.campaigns.victims import Pulling, Pushing
from tests.support.exhaustive import in_exhaustive


@in_exhaustive
@pytest.mark.skipif(not can_trap(), reason="strace is not installed, or may not trace")
@pytest.mark.parametrize("command", ["push", "pull", "merge"])
def test_a_command_killed_at_a_system_call_leaves_nothing_half_and_goes_on(
    command: str, tmp_path: Path
) -> None:
    words = ["--only", command, "--stores", "posix", "--calls", "3", "--moments", "0"]
    assert kill.main([*words, "--home", str(tmp_path)]) == 0


def test_the_killer_of_pulls_sees_what_is_half_there_late_or_left(tmp_path: Path) -> None:
    victim = Pulling("posix", tmp_path, random.Random(1))
    checkpoint = victim.destination / victim.CHECKPOINT
    shutil.copytree(victim.source, checkpoint)
    assert list(victim.harm()) == [f"{victim.CHECKPOINT} is there without its time"]
    (checkpoint / "ballast.bin").unlink()
    (victim.destination / "latest").write_text("global_step")
    (victim.destination / ".hidden").mkdir()
    wrong = list(victim.harm())
    assert wrong[0] == f"{victim.CHECKPOINT} is there, and is not what it was"
    assert wrong[-1] == "latest says 'global_step'"
    assert list(victim.left()) == [
        ".hidden: nobody wrote that",
        "latest is there, and is not whole",
        f"{victim.CHECKPOINT}/ballast.bin: is gone",
    ]


def test_the_killer_of_uploads_sees_what_is_torn_lost_nobodys_or_left(tmp_path: Path) -> None:
    victim = Pushing("posix", tmp_path, random.Random(1))
    victim.prepare()
    assert [*victim.harm(), *victim.finish()] == []
    root = tmp_path / "store" / "1"
    stored = root / victim.PUSHED / "ballast.bin"
    stored.rename(root / victim.PUSHED / "other.bin")
    (root / victim.PUSHED / ".ckptsync-0.part").write_bytes(bytes(100_000))
    name = f"{victim.PUSHED}/ballast.bin"
    other = f"{victim.PUSHED}/other.bin: nobody wrote that"
    assert list(victim.harm()) == [other, f"{name}: has a manifest, and is lost"]
    unfinished = f"{root / victim.PUSHED / '.ckptsync-0.part'}, 100000 bytes"
    assert list(victim.left()) == [other, f"{name}: is gone", f"left behind: {unfinished}"]
    stored.write_bytes(b"torn")
    assert f"{name} is there, and is not whole" in list(victim.harm())


def test_traps_are_the_changing_calls_behind_the_mark_counted_for_each_thread() -> None:
    trace = """\
7 write(1, "x"..., 1) = 1
7 access("/mark", F_OK) = -1 ENOENT
7 openat(AT_FDCWD, "/a", O_RDONLY) = 3
7 close(3) = 0
7 openat(AT_FDCWD, "/b", O_WRONLY|O_CREAT, 0666) = 3
8 write(4, "y", 1 <unfinished ...>
7 write(3, "z", 1) = 1
8 <... write resumed>) = 1"""
    expected = [("openat", 2), ("write", 1), ("write", 2)]
    assert traps(trace.splitlines(), "/mark") == expected
    assert {"write", "fsync", "renameat2", "sendto"} <= CHANGING
