from __future__ import annotations

import os
import sys
import threading

import pytest

from ckptsync.hooks import ray_worker


def test_the_store_is_told_to_hooks_that_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSYNC_STORE", "")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    ray_worker.prepare("/store")
    assert os.environ["CKPTSYNC_STORE"] == "/store"
    ray_worker.prepare("")
    assert os.environ["CKPTSYNC_STORE"] == "/store"


def test_what_cannot_be_done_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "ray" in ray_worker.serve("/store")
    monkeypatch.setitem(sys.modules, "ckptsync.doctor", None)
    assert "ckptsync.doctor" in ray_worker.tell_facts()["error"]


def test_a_worker_tells_of_its_machine() -> None:
    facts = ray_worker.tell_facts()
    assert "error" not in facts
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_copies_are_finished_before_a_worker_is_killed() -> None:
    finished, free = list[bool](), threading.Event()
    copying = threading.Thread(target=lambda: finished.append(free.wait(30)), name="ckptsync-copy")
    copying.start()
    threading.Timer(0.1, free.set).start()
    ray_worker.leave()
    assert finished == [True]
