"""Workers that are killed while they look, beside a trainer that commits and rotates: every
committed save stays, whole.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

from ckptsync.spool.pins import Pin, clean_own, list_pins
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.scanner import list_and_pin_saves
from tests.support.exhaustive import ALL
from tests.support.hook_pins import commit

ROOT = Path(__file__).parent.parent.parent
STEPS = 20 if ALL else 6
FILES = 8


def looking(out: Path, node: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.scanning_child", str(out), node],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )


def save(out: Path, step: int) -> None:
    """As a trainer with ``save_total_limit=1``: write, commit, and delete the one before."""
    source = out / f"checkpoint-{step}"
    source.mkdir()
    for n in range(FILES):
        (source / f"file-{n}").write_bytes(b"%d %d" % (step, n))
    commit(source, f"save-{step}")
    shutil.rmtree(out / f"checkpoint-{step - 1}", ignore_errors=True)


def is_whole(pin: Pin, step: int) -> bool:
    return pin.is_committed and [(pin.root / f"file-{n}").read_bytes() for n in range(FILES)] == [
        b"%d %d" % (step, n) for n in range(FILES)
    ]


def kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_every_save_stays_whole_whoever_is_killed_and_whatever_its_name(tmp_path: Path) -> None:
    chance = random.Random(7)
    children = [looking(tmp_path, f"n{n}") for n in range(2)]
    try:
        for step in range(1, STEPS + 1):
            save(tmp_path, step)
            for n, child in enumerate(children):
                assert child.stdout
                assert child.stdout.readline(), (
                    "it looked: so that saves and looks overlap, however quick either is"
                )
                if chance.random() < 0.1:
                    kill(child)
                    children[n] = looking(tmp_path, f"n{n}")
    finally:
        for child in children:
            kill(child)
    for node in ("n0", "n1"):
        clean_own(tmp_path, node)
    last = list_and_pin_saves(RunDir("run", tmp_path), Pinner("n2", lambda *_: False))
    assert last.failures == ()
    whole = {p.commit.step for p in list_pins(tmp_path) if p.commit and is_whole(p, p.commit.step)}
    assert whole == set(range(1, STEPS + 1))
    assert all(p.node for p in list_pins(tmp_path))
