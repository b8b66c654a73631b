"""One look: everything that is here is pinned, and one that cannot be seen hides no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.worker.looking import Seat, Seen, look
from ckptsync.worker.options import RunDir
from ckptsync.worker.result import Failure
from tests.test_worker_push import ONE, lay


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


def test_a_save_that_was_removed_stands_beside_the_one_that_came_in_its_place(tmp_path: Path) -> None:
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
    (tmp_path / "_ckptsync").chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=False, capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert "('checkpoint-8', 'ConfigError', True)" in done.stdout, done.stderr
    protected = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    assert ("('checkpoint-4', 'ConfigError', True)" in done.stdout) == protected
