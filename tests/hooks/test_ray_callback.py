"""A real Ray Train run: slow, and skipped where Ray Train is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks import ray_checkpoints
from tests.hooks.ray_loop import STEPS

pytest.importorskip("ray.train", reason="Ray Train is not installed")
pytest.importorskip("pyarrow", reason="Ray Train needs pyarrow, which is not installed")

from ckptsync.hooks import ray_callback
from ckptsync.hooks.ray import CkptSyncRayCallback
from ckptsync.hooks.ray_callback import worker_variables

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Ended:
    """What a program's Ray runs have come to."""

    home: Path
    told: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    with tempfile.TemporaryDirectory(
        prefix="ckr-"
    ) as folder:  # the paths of Ray's sockets are in it, and may not be long
        above = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "PYTHONPATH": above, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "hooks" / "ray_loop.py"), folder]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield Ended(Path(folder), json.loads(done.stdout.splitlines()[-1]), done.stderr)


def test_what_was_reported_is_in_the_store_verified_and_ray_keeps_a_note(ended: Ended) -> None:
    found = ended.told["reported"]["checkpoints"]
    assert len(found) == STEPS
    for step, (name, metrics) in enumerate(found, 1):
        note = ray_checkpoints.decode_note(
            (Path(ended.told["reported"]["path"]) / name / "ckptsync.json").read_bytes(), name
        )
        files = {
            path.name: path.read_text()
            for path in (ended.home / "store" / note.run / note.location).iterdir()
        }
        assert files == dict.fromkeys(("rank-0", "rank-1"), f"{step} {int(step > 1)}")
        assert metrics["ckptsync_verdict"] != "damaged"
        assert [path.name for path in (Path(ended.told["reported"]["path"]) / name).iterdir()] == [
            "ckptsync.json"
        ]


def test_a_run_whose_worker_was_killed_in_a_report_goes_on_from_the_store(ended: Ended) -> None:
    seen = [metrics["seen"] for _, metrics in ended.told["reported"]["checkpoints"]]
    assert seen == [{}, *[{"rank-0": "1 0", "rank-1": "1 0"}] * (STEPS - 1)]


def test_a_training_does_not_begin_on_nodes_that_do_not_fit(ended: Ended) -> None:
    assert not ended.told["fail"]["began"]
    assert "the nodes' environments are incompatible" in ended.told["fail"]["error"]
    assert "nosuch0" in ended.told["fail"]["error"]


def test_what_is_only_to_be_warned_of_is_seen_where_the_script_runs(ended: Ended) -> None:
    assert ended.told["warn"] == {"error": "", "began": True}
    told = r"ckptsync: \S+: GLOO_SOCKET_IFNAME: nosuch0: not found among "
    assert re.search(told, ended.said)


def test_each_worker_process_is_set_up_by_ray(ended: Ended) -> None:
    assert ended.told["awaiting"]


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
