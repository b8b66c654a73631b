from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.hooks import ray_worker
from ckptsync.hooks.asked import Asked, asked
from tests.hooking import commits

ENDED_BY_RAY = """
import os, sys
from pathlib import Path
from tests.hook_training import Faults, train
from ckptsync.hooks import ray_worker
train(Path(sys.argv[1]), Faults())
if sys.argv[2] == "well":
    ray_worker.leave()
os._exit(0)
"""


def test_the_drivers_words_are_told_to_hooks_that_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSYNC_STORE", "")
    monkeypatch.setenv("CKPTSYNC_WAIT", "5")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    ray_worker.prepare({"CKPTSYNC_STORE": "/store"})
    assert asked(os.environ) == Asked("/store", 5.0)


def test_what_cannot_be_done_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "ray" in ray_worker.serve("/store")
    monkeypatch.setitem(sys.modules, "ckptsync.doctor", None)
    assert "ckptsync.doctor" in ray_worker.tell_facts()["error"]


def test_a_worker_tells_of_its_machine() -> None:
    facts = ray_worker.tell_facts()
    assert "error" not in facts
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_who_cannot_tell_of_himself_in_time_says_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer must not keep a training from its beginning."""
    hangs = tmp_path / "nvidia-smi"
    hangs.write_text("#!/bin/sh\nexec sleep 5\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "no answer within 0.2 s" in ray_worker.tell_facts(0.2)["error"]


def test_copies_are_finished_before_a_worker_is_killed() -> None:
    finished, free = list[bool](), threading.Event()
    copying = threading.Thread(target=lambda: finished.append(free.wait(30)), name="ckptsync-copy")
    copying.start()
    threading.Timer(0.1, free.set).start()
    ray_worker.leave()
    assert finished == [True]


@pytest.mark.parametrize("how", ["well", "with an error"])
def test_the_final_model_is_pinned_before_ray_kills_a_worker_that_has_ended_well(tmp_path: Path, how: str) -> None:
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", ENDED_BY_RAY, str(tmp_path / "out"), how], cwd=root, check=True, capture_output=True)
    assert ("final.0" in commits(tmp_path / "out")) == (how == "well")
