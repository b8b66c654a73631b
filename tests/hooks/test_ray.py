from __future__ import annotations

import sys

import pytest

from ckptsync.hooks import ray
from ckptsync.hooks.ray import setup_worker
from tests.support.stand_in_programs import ROOT, ran

SETUP = """
import sys
from ckptsync.hooks.ray import setup_worker
assert not {"ray", "transformers", "torch", "msgspec", "numpy"} & set(sys.modules), \
sorted(sys.modules)
before = len(sys.meta_path)
setup_worker(); setup_worker()
print(len(sys.meta_path) - before)
"""


def test_a_ray_worker_is_set_up_once_and_imports_nothing_for_it() -> None:
    assert ran("-c", SETUP, path=(ROOT,)).stdout.strip() == "1"


def test_the_callback_is_found_by_its_public_name() -> None:
    pytest.importorskip("ray.train", reason="Ray Train is not installed")
    assert ray.CkptSyncRayCallback.__name__ == "CkptSyncRayCallback"


def test_no_other_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CkptSync'"):
        _ = ray.CkptSync


def test_a_worker_waits_for_a_trainer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    before = len(sys.meta_path)
    setup_worker()
    setup_worker()
    assert len(sys.meta_path) == before + 1
