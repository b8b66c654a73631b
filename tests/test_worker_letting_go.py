"""Pins go when the store has proven that it has their files, and not before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import letting_go
from ckptsync.worker.remembering import kept_of
from tests.test_worker_push import ONE, lay
from tests.test_worker_tick import EIGHT, pinned, settle, verify, worker


def test_of_what_is_proven_the_newest_pins_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    w = worker(tmp_path, store, keep=0)
    settle(w)
    w.tick(1000.0)
    assert pinned(tmp_path) == ["checkpoint-4.0", "checkpoint-8.0"]
    verify(store, "checkpoint-4")
    w.tick(1001.0)
    assert pinned(tmp_path) == ["checkpoint-8.0"]


def test_what_is_kept_of_a_checkpoint_that_cannot_be_looked_at_for_a_moment_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=0)
    settle(w)
    verify(store)
    w.tick(1000.0)
    before = kept_of(tmp_path, "checkpoint-4")
    assert before
    deep = source.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)  # an error of this one checkpoint
    assert [f.checkpoint for f in w.tick(1001.0).failures] == ["checkpoint-4"]
    shutil.rmtree(source / "d")
    strange = tmp_path / "_ckptsync/pins/checkpoint-9.0"
    strange.joinpath("files", *["d"] * 40).mkdir(parents=True)  # and one of the whole run
    assert {f.checkpoint for f in w.tick(1002.0).failures} == {""}
    shutil.rmtree(strange)
    assert kept_of(tmp_path, "checkpoint-4") == before
    shutil.rmtree(source)
    w.tick(1003.0)
    assert kept_of(tmp_path, "checkpoint-4") == ()


def test_a_full_spool_lets_go_of_pins_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=0)
    settle(w)
    verify(store)

    def full(*_: object) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(letting_go, "remember", full)
    w.tick(1000.0)
    assert pinned(tmp_path) == []
