"""The callback of Ray Train, where that is installed; `docs/guides/ray-train.md` runs it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError

pytest.importorskip("ray.train", reason="Ray Train is not installed")
pytest.importorskip("pyarrow", reason="Ray Train needs pyarrow, which is not installed")

from ckptsync.hooks import ray_callback
from ckptsync.hooks.ray import CkptSyncRayCallback
from ckptsync.hooks.ray_callback import worker_variables


def test_what_doctor_may_do_is_one_of_three_words() -> None:
    with pytest.raises(ConfigError, match="not one of fail, warn, off"):
        CkptSyncRayCallback(doctor="maybe")


def test_a_relative_store_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTSYNC_STORE", "store")
    assert CkptSyncRayCallback()._variables["CKPTSYNC_STORE"] == str(tmp_path / "store")
    assert CkptSyncRayCallback("s3://bucket")._variables["CKPTSYNC_STORE"] == "s3://bucket"


@pytest.mark.parametrize("store", ["sftp://me:secret@host/x", "s3:/bucket"])
def test_a_store_that_cannot_be_one_is_refused_where_the_script_runs(store: str) -> None:
    with pytest.raises(ConfigError) as told:
        CkptSyncRayCallback(store)
    assert "secret" not in str(told.value)


def test_where_ray_would_never_call_it_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(ConfigError, match="of Ray Train v2, which is turned off"):
        CkptSyncRayCallback()


def test_the_drivers_words_go_to_the_workers_and_its_keys_do_not() -> None:
    said = {
        "CKPTSYNC_WAIT": "10m",
        "CKPTSYNC_RUN": "sft",
        "CKPTSYNC_LIMITS_BANDWIDTH": "1MB",
        "CKPTSYNC_STORAGE_OPTIONS": "{}",
        "CKPTSYNC_NODE": "head",
        "PATH": "",
    }
    assert worker_variables(said) == {
        "CKPTSYNC_WAIT": "10m",
        "CKPTSYNC_RUN": "sft",
        "CKPTSYNC_LIMITS_BANDWIDTH": "1MB",
    }


def test_a_run_in_the_store_is_named_after_the_ray_run_unless_somebody_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptsync.hooks.autoload.install", lambda: None)
    for told, name in (({}, "my-run-{dir}"), ({"CKPTSYNC_RUN": "sft"}, "sft")):
        monkeypatch.delenv("CKPTSYNC_RUN", raising=False)
        ray_callback.prepare(told, "_my run")
        assert os.environ["CKPTSYNC_RUN"] == name


def test_a_worker_tells_of_its_machine_or_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error" not in ray_callback.probe_node()
    monkeypatch.setattr("ckptsync.doctor.probe.gather", lambda: time.sleep(5))
    assert "no answer within 0.1 s" in ray_callback.probe_node(0.1)["error"]
