from __future__ import annotations

import sys

import pytest

from ckptsync.hooks.ray_setup import setup_worker


def test_a_worker_waits_for_a_trainer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    before = len(sys.meta_path)
    setup_worker()
    setup_worker()
    assert len(sys.meta_path) == before + 1


def test_what_is_wrong_in_the_set_up_does_not_reach_ray(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptsync.hooks.autoload", None)
    monkeypatch.delattr("ckptsync.hooks.autoload", raising=False)
    setup_worker()
    assert "no hook in this Ray worker" in caplog.text
