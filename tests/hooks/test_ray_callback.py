"""A real Ray Train run: slow, and skipped where Ray Train is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks import ending, ray_checkpoints
from tests.hooks.ray_loop import STEPS

pytest.importorskip("ray.train", reason="Ray Train is not installed")
pytest.importorskip("pyarrow", reason="Ray Train needs pyarrow, which is not installed")

from ckptsync.hooks.ray_callback import CkptSyncRayCallback, worker_variables

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Ended:
    """What a program's Ray runs have come to."""

    home: Path
    told: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    with tempfile.TemporaryDirectory(prefix="ckr-") as folder:  # the paths of Ray's sockets are in it, and may not be long
        above = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "PYTHONPATH": above, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "hooks" / "ray_loop.py"), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        yield Ended(Path(folder), json.loads(done.stdout.splitlines()[-1]), done.stderr)
        spools = [*Path(folder, "t").glob("session_2*/artifacts/*/_ckptsync")]
        assert until(lambda: not any(map(ending.is_served, spools)))  # what Ray left to us must not lose its ground


def until(is_so: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it becomes so."""
    over = threading.Event()
    return any(is_so() or over.wait(0.1) for _ in range(int(seconds * 10)))


def test_what_was_reported_is_in_the_store_verified_and_ray_keeps_a_note(ended: Ended) -> None:
    found = ended.told["reported"]["checkpoints"]
    assert len(found) == STEPS
    for step, (name, metrics) in enumerate(found, 1):
        note = ray_checkpoints.decode_note((Path(ended.told["reported"]["path"]) / name / "ckptsync.json").read_bytes(), name)
        files = {path.name: path.read_text() for path in (ended.home / "store" / note.run / note.location).iterdir()}
        assert files == dict.fromkeys(("rank-0", "rank-1"), f"{step} {int(step > 1)}")
        assert metrics["ckptsync_verdict"] != "damaged"
        assert [path.name for path in (Path(ended.told["reported"]["path"]) / name).iterdir()] == ["ckptsync.json"]


def test_a_run_whose_worker_was_killed_in_a_report_goes_on_from_the_store(ended: Ended) -> None:
    seen = [metrics["seen"] for _, metrics in ended.told["reported"]["checkpoints"]]
    assert seen == [{}, *[{"rank-0": "1 0", "rank-1": "1 0"}] * (STEPS - 1)]


def test_what_the_nodes_worker_sends_is_sent_by_no_other_though_rays_directory_is_behind_a_link(ended: Ended) -> None:
    assert [metrics["covered"] for _, metrics in ended.told["reported"]["checkpoints"]] == [True] * STEPS


def test_for_a_worker_that_ray_replaces_alone_a_worker_of_ours_is_begun_too(ended: Ended) -> None:
    assert ended.told["replaced"] in ({"told": True}, {})  # not every version of Ray replaces workers alone


def test_relative_outputs_are_sent_by_the_nodes_worker_though_ray_has_ended(ended: Ended) -> None:
    last = ended.home / "store" / "sft-out" / f"checkpoint-{STEPS}" / "trainer_state.json"
    assert until(last.exists), (ended.home / "store").exists()
    assert json.loads(last.read_text())["global_step"] == STEPS


def test_a_training_does_not_begin_on_nodes_that_do_not_fit(ended: Ended) -> None:
    assert not ended.told["unfit"]["began"]
    assert "the nodes do not fit together" in ended.told["unfit"]["error"]
    assert "nosuch0" in ended.told["unfit"]["error"]


def test_what_is_only_to_be_warned_of_is_seen_where_the_script_runs(ended: Ended) -> None:
    assert not ended.told["replaced"] or "nosuch1: there is none" in ended.said


def test_each_worker_process_is_set_up_by_ray(ended: Ended) -> None:
    assert ended.told["awaiting"]


def test_what_doctor_may_do_is_one_of_three_words() -> None:
    with pytest.raises(ConfigError, match="not one of fail, warn, off"):
        CkptSyncRayCallback(doctor="maybe")


def test_a_relative_store_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTSYNC_STORE", "store")
    assert CkptSyncRayCallback()._store == str(tmp_path / "store")
    assert CkptSyncRayCallback("s3://bucket")._store == "s3://bucket"


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
    assert worker_variables(said) == {"CKPTSYNC_WAIT": "10m", "CKPTSYNC_RUN": "sft", "CKPTSYNC_LIMITS_BANDWIDTH": "1MB"}
