"""The campaign that kills writers sees what is wrong.

`make kill-stores`, which CI runs in short, kills them.
"""

from __future__ import annotations

from pathlib import Path

from tests.campaigns.stores_kill import OLD, SMALL
from tests.campaigns.stores_locations import location
from tests.campaigns.stores_work import Work, Writing
from tests.campaigns.trapping import CHANGING, Trap, after


def test_a_campaign_sees_what_is_lost_torn_or_too_much(tmp_path: Path) -> None:
    work: Work = Writing(tmp_path, SMALL, OLD)
    with location("posix", tmp_path) as there:
        work.prepare(there)
        assert work.violations(there, set()) == []
        assert work.violations(there, {"run/deep/b"}) == [
            "run/deep/b: lost, although it was acknowledged, or there before"
        ]
        root = Path(there.url)
        (root / "run" / "deep").mkdir()
        (root / "run" / "deep" / "b").write_bytes(SMALL[1].content()[:-1])
        assert work.violations(there, set()) == [
            "run/deep/b: 4999 bytes that nobody wrote, 4999 are listed"
        ]
        (root / "run" / "deep" / "b").rename(root / "run" / "x")
        assert work.violations(there, set()) == ["run/x: nobody wrote that"]
        (root / "run" / "x").unlink()
        assert work.violations(there, {OLD.name}) == [
            "run/a: 70000 bytes that nobody wrote, 70000 are listed"
        ]
        (root / "run" / "a").unlink()
        assert work.violations(there, set()) == [
            "run/a: lost, although it was acknowledged, or there before"
        ]
        assert work.finish(there) == {file.name for file in SMALL}


def test_traps_are_the_changing_calls_behind_the_mark_counted_for_each_thread() -> None:
    trace = """\
7 write(1, "x"..., 1) = 1
7 access("/mark", F_OK) = -1 ENOENT
7 openat(AT_FDCWD, "/a", O_RDONLY) = 3
7 close(3) = 0
7 openat(AT_FDCWD, "/b", O_WRONLY|O_CREAT, 0666) = 3
8 write(4, "y", 1 <unfinished ...>
7 write(3, "z", 1) = 1
8 <... write resumed>) = 1
7 close(3) = 0"""
    assert after(trace.splitlines(), "/mark") == [
        Trap("openat", 2),
        Trap("write", 1),
        Trap("write", 2),
        Trap("close", 2),
    ]
    assert {"write", "fsync", "renameat2", "sendto"} <= set(CHANGING)
