"""One look: everything that is here is pinned, and one that cannot be seen hides no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.spool.marks import say
from ckptsync.spool.pins import mark_stored, pins
from ckptsync.worker.budget import SpoolRule
from ckptsync.worker.looking import Look, Seat, Seen, look
from ckptsync.worker.options import RunDir
from ckptsync.worker.result import Failure
from tests.hook_pins import commit
from tests.test_worker_push import ONE, lay

ROOT = Path(__file__).parent.parent


def looked(out: Path, node: str = "n0", *, is_proven: bool = False) -> tuple[tuple[Seen, ...], tuple[Failure, ...]]:
    found = look(RunDir("run", out), Seat(node, lambda *_: (), lambda *_: is_proven))
    return found.seen, found.failures


def test_every_save_is_seen_by_step_with_its_pin(tmp_path: Path) -> None:
    for step in (12, 4):
        lay(tmp_path / "x", ONE).rename(tmp_path / f"checkpoint-{step}")
    seen, failures = looked(tmp_path)
    assert [(s.spot.name, s.k, s.hold.gone, s.hold.unpinned) for s in seen] == [
        ("checkpoint-4", 0, False, ()),
        ("checkpoint-12", 0, False, ()),
    ]
    assert failures == ()


def test_a_save_that_was_removed_stands_beside_the_one_that_came_in_its_location(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    looked(tmp_path)
    shutil.rmtree(source)
    assert [(s.k, s.hold.gone) for s in looked(tmp_path)[0]] == [(0, True)]
    lay(tmp_path, ONE, 5000.0)
    assert [(s.k, s.hold.gone) for s in looked(tmp_path)[0]] == [(0, True), (1, False)]


def test_what_is_proven_and_not_pinned_is_not_pinned_again(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    ((one,), _) = looked(tmp_path, is_proven=True)
    assert one.pin is None
    assert not (tmp_path / "_ckptsync").exists()


def test_another_nodes_pin_is_seen_and_let_be(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    looked(tmp_path, "n0")
    ((one,), _) = looked(tmp_path, "n1")
    assert one.pin is not None
    assert one.pin.node == "n0"


class During(list[str]):
    """Names to leave out, none; when the pins of a look have been listed, something happens."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._calls, self._happens = 0, happens

    def __contains__(self, name: object) -> bool:
        self._calls += 1
        if self._calls == 2:  # the first time of the checkpoint itself, then of its pin
            self._happens()
        return False


def test_what_the_hook_commits_and_rotation_takes_during_one_look_is_not_called_missed(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    (source / next(iter(ONE))).rename(tmp_path / "late")
    looked(tmp_path)

    def finish() -> None:
        (tmp_path / "late").rename(source / next(iter(ONE)))
        commit(source)
        shutil.rmtree(source)

    found = look(RunDir("run", tmp_path), Seat("n0", lambda *_: (), lambda *_: False), During(finish))
    assert [(s.k, s.hold.gone, s.pin is not None and s.pin.is_committed) for s in found.seen] == [(1, True, True)]


def test_a_pin_of_the_hook_is_ours_whatever_our_name_and_stands_for_the_save_alone(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    first = next(iter(ONE))
    (source / first).rename(tmp_path / "late")
    looked(tmp_path, "a-name-that-no-hook-knows")
    (tmp_path / "late").rename(source / first)
    commit(source)
    shutil.rmtree(source)
    ((one,), failures) = looked(tmp_path, "a-name-that-no-hook-knows")
    assert (one.k, one.pin and one.pin.node, failures) == (1, "a-name-that-no-hook-knows", ())
    assert one.pin
    assert one.pin.is_committed
    assert sorted(one.hold.held) == sorted(ONE)


def test_a_save_that_was_spoiled_before_it_was_sent_is_told_of(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    commit(source)
    seat = Seat("n0", lambda *_: (), lambda *_: False)
    assert look(RunDir("run", tmp_path), seat).notes == ()
    names = sorted(ONE)
    (source / names[0]).write_bytes(b"again, in place")
    (source / names[1]).unlink()
    (source / names[1]).write_bytes(b"again, by another file")
    for _ in range(2):
        assert "written again in place before it was sent" in look(RunDir("run", tmp_path), seat).notes[0]


def rotated(out: Path, *steps: int) -> None:
    """Saves that the hook committed and rotation took, and one that is still there."""
    for step in (*steps, 99):
        source = lay(out, ONE).rename(out / f"checkpoint-{step}")
        commit(source)
        if step != 99:
            shutil.rmtree(source)


def budgeted(out: Path, budget: int, full: str = "oldest") -> Look:
    return look(RunDir("run", out), Seat("n0", lambda *_: (), lambda *_: False, SpoolRule(budget, full)))


def test_the_budget_is_kept_aloud_and_what_the_store_has_goes_first(tmp_path: Path) -> None:
    size = sum(map(len, ONE.values()))
    rotated(tmp_path, 1, 2, 3)
    mark_stored(next(p for p in pins(tmp_path) if p.checkpoint == "checkpoint-2"))
    assert [s.spot.name for s in budgeted(tmp_path, 3 * size).seen] == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-99",
    ]
    quiet = budgeted(tmp_path, 2 * size)
    assert ([s.spot.name for s in quiet.seen], quiet.notes) == (["checkpoint-1", "checkpoint-3", "checkpoint-99"], ())
    loud = budgeted(tmp_path, size)
    assert [s.spot.name for s in loud.seen] == ["checkpoint-3", "checkpoint-99"]
    assert loud.notes[0].startswith("checkpoint-1: given up before it was stored")


def test_who_waits_pins_nothing_new_and_still_sees_it(tmp_path: Path) -> None:
    rotated(tmp_path, 1)
    lay(tmp_path, ONE)
    found = budgeted(tmp_path, 1, "wait")
    assert [(s.spot.name, s.pin is None) for s in found.seen] == [
        ("checkpoint-1", False),
        ("checkpoint-4", True),
        ("checkpoint-99", False),
    ]
    assert "nothing new is pinned until something is stored" in found.notes[0]
    assert budgeted(tmp_path, 1, "oldest").seen[1].pin is not None


def test_what_a_hook_had_to_say_is_told(tmp_path: Path) -> None:
    rotated(tmp_path)
    say(tmp_path / "_ckptsync", "pinning failed: No space left on device")
    assert budgeted(tmp_path, 0).notes == ("pinning failed: No space left on device",)


def test_on_a_full_disk_everything_is_still_seen_and_what_cannot_be_done_is_a_failure(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.test_worker_looking import *\n"
        "out = Path(sys.argv[1]); rotated(out, 1); lay(out, ONE)\n"
        "def fill():\n for n in range(99): (out / f'filler{n}').touch()\n"
        "try: fill()\nexcept OSError: pass\n"
        "found = look(RunDir('run', out), Seat('n0', lambda *_: (), lambda *_: False))\n"
        "print([(s.spot.name, len(s.hold.held), s.pin and s.pin.node) for s in found.seen])\n"
        "print(sorted((f.checkpoint, 'No space left' in f.text) for f in found.failures))\n"
    )
    mounted = f'mount -t tmpfs -o nr_inodes=45 tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, sys.executable, program],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    count = len(ONE)
    assert done.stdout.splitlines() == [
        f"[('checkpoint-1', {count}, 'n0'), ('checkpoint-4', {count}, None), ('checkpoint-99', {count}, 'n0')]",
        "[('checkpoint-1', True), ('checkpoint-4', True), ('checkpoint-99', True)]",
    ], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_files_of_another_user_are_a_failure_with_advice_and_hide_no_other_checkpoint(tmp_path: Path) -> None:
    lay(tmp_path / "x", ONE).rename(tmp_path / "checkpoint-4")
    lay(tmp_path / "x", ONE).rename(tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8").chmod(0)
    program = (
        "import os, sys; from pathlib import Path; from tests.test_worker_looking import looked\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); seen, failed = looked(Path(sys.argv[1]))\n"
        "print([s.spot.name for s in seen], [(f.checkpoint, f.error, 'the user who trains' in f.hint) for f in failed])"
    )
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)
    (tmp_path / "_ckptsync").mkdir(mode=0o777)
    os.chown(tmp_path / "_ckptsync", 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=False, capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert "('checkpoint-8', 'ConfigError', True)" in done.stdout, done.stderr
    protected = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    assert ("('checkpoint-4', 'ConfigError', True)" in done.stdout) == protected
