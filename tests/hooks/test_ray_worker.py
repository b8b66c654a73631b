from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.config.readers import RunConfig
from ckptsync.config.runs import output_directories
from ckptsync.hooks import embedded, ending, ray_worker
from ckptsync.hooks.embedded import Options, from_environment
from ckptsync.spool import marks
from tests.hooks.training import commits


def training() -> subprocess.Popen[bytes]:
    """A process that trains until its input ends."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def gone(pid: int, began: str, patience: float = 60) -> bool:
    """Whether a process that is nobody's child ends within that time."""
    over = threading.Event()
    for _ in range(int(patience * 20)):
        if marks.began(pid) != began:
            return True
        over.wait(0.05)
    return False


def until(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so."""
    over = threading.Event()
    return any(is_so() or over.wait(0.05) for _ in range(1200))


def write(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": int(checkpoint.name.rpartition("-")[2])}))


def test_the_runs_own_checkpoints_and_those_of_directories_in_it_have_names_of_their_own(tmp_path: Path) -> None:
    ray = tmp_path / "session_2026" / "artifacts" / "sft"
    for name in ("out/checkpoint-1", "checkpoint-2", "data"):
        (ray / name).mkdir(parents=True)
    (tmp_path / "session_2026" / "artifacts" / "other" / "out" / "checkpoint-1").mkdir(parents=True)
    told = [RunConfig(run["path"], run.get("name", "")) for run in ray_worker.run_patterns(ray, "sft")]
    found = output_directories(told, str(tmp_path / "store"))
    assert found.problems == ()
    assert {run.name: run.path for run in found.runs} == {"sft": str(ray), "sft-out": str(ray / "out")}


@pytest.mark.parametrize(
    ("name", "out"), [("_x", "artifacts-_x-out"), ("[1]", "artifacts-[1]-out"), ("!a*", "artifacts-!a*-out"), ("a b", "a b-out")]
)
def test_outputs_of_a_run_with_an_odd_name_are_found_too(tmp_path: Path, name: str, out: str) -> None:
    for run in (name, "x", "1", "ab"):
        write(tmp_path / "artifacts" / run / "out" / "checkpoint-1")
    told = [RunConfig(run["path"], run.get("name", "")) for run in ray_worker.run_patterns(tmp_path / "artifacts" / name, name)]
    found = output_directories(told, str(tmp_path / "store"))
    assert found.problems == ()
    assert {run.name for run in found.runs} == {ray_worker.store_name(name), out}


def test_a_ray_runs_name_becomes_one_that_a_store_can_keep() -> None:
    names = ("sft", "ray_train_run-2026-11-21_20-00-00", "my run/1", "_x", "***")
    assert [ray_worker.store_name(name) for name in names] == ["sft", names[1], "my-run-1", "x", "ray"]


def test_the_nodes_worker_sends_what_anybody_writes_there_and_ends_when_the_ray_worker_has_gone(tmp_path: Path) -> None:
    directory, store = tmp_path / "artifacts" / "sft", tmp_path / "store"
    trains = training()
    worker = ray_worker.start(str(store), directory, "sft", trains.pid)
    try:
        assert f"{marks.began(worker.pid)}" == worker.began
        write(directory / "out" / "checkpoint-1")
        write(directory / "checkpoint-2")
        trains.communicate()
        assert gone(worker.pid, worker.began), (directory / "_ckptsync" / "embedded.log").read_text()
    finally:
        trains.communicate()
        if marks.began(worker.pid) == worker.began:
            os.kill(worker.pid, signal.SIGKILL)
    assert (store / "sft-out" / "checkpoint-1" / "model.safetensors").exists()
    assert (store / "sft" / "checkpoint-2" / "model.safetensors").exists()
    assert not worker.is_running()


def test_what_keeps_a_worker_from_its_work_is_heard_while_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nosuch")  # as where only the driver has keys
    directory, trains = tmp_path / "artifacts" / "sft", training()
    for _ in range(2):
        since = ray_worker.log_size(directory)
        worker = ray_worker.start("s3://bucket/x", directory, "sft", trains.pid)
        said = ray_worker.wait_for_error(worker, directory, since)
        assert said.count("error: s3://bucket/x: The config profile (nosuch) could not be found; hint: ") == 1
    assert trains.poll() is None
    trains.communicate()


def test_it_is_no_child_of_the_process_that_starts_it(spool: Path) -> None:
    worker = embedded.start_apart(
        [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(60)"], spool / "log"
    )
    try:
        children = {int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
        assert worker.pid not in children
        assert os.getsid(worker.pid) == worker.pid
        assert worker.is_running()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid, worker.began)


def test_a_process_that_cannot_be_started_is_an_error(spool: Path) -> None:
    with pytest.raises(OSError, match="could not be started"):
        embedded.start_apart([str(spool / "none")], spool / "log")


def test_of_several_that_begin_at_once_one_works_and_the_next_comes_after_it(tmp_path: Path) -> None:
    """As where Ray replaces single workers: each of them is the first of its own, on one node."""
    directory, train = tmp_path / "artifacts" / "sft", [training(), training()]
    workers = [ray_worker.start(str(tmp_path / "store"), directory, "sft", one.pid) for one in train]
    try:
        assert until(lambda: ending.is_served(directory / "_ckptsync"))
        first = 0 if is_at_work(workers[0]) else 1
        train[first].communicate()
        assert gone(workers[first].pid, workers[first].began), (directory / "_ckptsync" / "embedded.log").read_text()
        assert until(lambda: is_at_work(workers[1 - first]))
    finally:
        for one, worker in zip(train, workers, strict=True):
            one.communicate()
            if marks.began(worker.pid) == worker.began:
                os.kill(worker.pid, signal.SIGKILL)


def is_at_work(worker: embedded.Worker) -> bool:
    """Whether it is a service by now."""
    told = Path(f"/proc/{worker.pid}/cmdline").read_bytes() if marks.began(worker.pid) == worker.began else b""
    return b"--until-gone" in told.split(b"\0")


ENDED_BY_RAY = """
import os, sys
from pathlib import Path
from tests.hooks.trainer_events import Faults, train
from ckptsync.hooks import ray_worker
train(Path(sys.argv[1]), Faults())
if sys.argv[2] == "well":
    ray_worker.finish()
os._exit(0)
"""


def test_the_drivers_words_are_told_to_hooks_that_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSYNC_STORE", "")
    monkeypatch.setenv("CKPTSYNC_WAIT", "5")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    ray_worker.prepare({"CKPTSYNC_STORE": "/store"})
    assert from_environment(os.environ) == Options("/store", 5.0)


def test_what_cannot_be_done_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "ray" in ray_worker.serve("/store")
    monkeypatch.setitem(sys.modules, "ckptsync.doctor", None)
    assert "ckptsync.doctor" in ray_worker.probe_node()["error"]


def test_a_worker_tells_of_its_machine() -> None:
    facts = ray_worker.probe_node()
    assert "error" not in facts
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_who_cannot_tell_of_himself_in_time_says_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer must not keep a training from its beginning."""
    hangs = tmp_path / "nvidia-smi"
    hangs.write_text("#!/bin/sh\nexec sleep 5\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "no answer within 0.2 s" in ray_worker.probe_node(0.2)["error"]


def test_copies_are_finished_before_a_worker_is_killed() -> None:
    finished, free = list[bool](), threading.Event()
    copying = threading.Thread(target=lambda: finished.append(free.wait(30)), name="ckptsync-copy")
    copying.start()
    threading.Timer(0.1, free.set).start()
    ray_worker.finish()
    assert finished == [True]


@pytest.mark.parametrize("how", ["well", "with an error"])
def test_the_final_model_is_pinned_before_ray_kills_a_worker_that_has_ended_well(tmp_path: Path, how: str) -> None:
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", ENDED_BY_RAY, str(tmp_path / "out"), how], cwd=root, check=True, capture_output=True)
    assert ("final.0" in commits(tmp_path / "out")) == (how == "well")
