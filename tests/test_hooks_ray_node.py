from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync.config.runs import output_directories
from ckptsync.config.values import RunConfig
from ckptsync.hooks import embedded, ray_node
from ckptsync.spool import marks


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


def write(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": int(checkpoint.name.rpartition("-")[2])}))


def test_the_runs_own_checkpoints_and_those_of_directories_in_it_have_names_of_their_own(tmp_path: Path) -> None:
    ray = tmp_path / "session_2026" / "artifacts" / "sft"
    for name in ("out/checkpoint-1", "checkpoint-2", "data"):
        (ray / name).mkdir(parents=True)
    (tmp_path / "session_2026" / "artifacts" / "other" / "out" / "checkpoint-1").mkdir(parents=True)
    told = [RunConfig(run["path"], run.get("name", "")) for run in ray_node.runs(ray, "sft")]
    found = output_directories(told, str(tmp_path / "store"))
    assert found.problems == ()
    assert {run.name: run.path for run in found.runs} == {"sft": str(ray), "sft-out": str(ray / "out")}


def test_a_ray_runs_name_becomes_one_that_a_store_can_keep() -> None:
    names = ("sft", "ray_train_run-2026-11-21_20-00-00", "my run/1", "_x", "***")
    assert [ray_node.plain(name) for name in names] == ["sft", names[1], "my-run-1", "x", "ray"]


def test_the_nodes_worker_sends_what_anybody_writes_there_and_ends_when_the_ray_worker_has_gone(tmp_path: Path) -> None:
    directory, store = tmp_path / "artifacts" / "sft", tmp_path / "store"
    trains = training()
    worker = ray_node.start(str(store), directory, "sft", trains.pid)
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
    assert worker.poll() == 1


def test_it_is_no_child_of_the_process_that_starts_it(tmp_path: Path) -> None:
    worker = embedded.start_apart(
        [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(60)"], tmp_path / "log", tmp_path
    )
    try:
        children = {int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
        assert worker.pid not in children
        assert os.getsid(worker.pid) == worker.pid
        assert worker.poll() is None
    finally:
        os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid, worker.began)


def test_a_process_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be started"):
        embedded.start_apart([str(tmp_path / "none")], tmp_path / "log", tmp_path)


@pytest.mark.parametrize("ends_first", ["worker", "training"])
def test_one_that_is_at_work_is_waited_for_and_trusted_with_what_is_left(tmp_path: Path, ends_first: str) -> None:
    trains = training()
    began, answers = marks.began(trains.pid), list[bool]()
    with (tmp_path / "worker-node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: answers.append(ray_node.await_turn(tmp_path, trains.pid, began)))
        waiting.start()
        if ends_first == "training":
            trains.communicate()
            waiting.join(30)
    waiting.join(30)
    trains.communicate()
    assert answers == [ends_first == "worker"]


def test_outputs_that_the_nodes_worker_sees_need_none_of_their_own(tmp_path: Path) -> None:
    embedded.cover({tmp_path / "sft"})
    inside = [tmp_path / "sft", tmp_path / "sft" / "out", tmp_path / "sft" / "a" / "b", tmp_path / "other"]
    assert [embedded.is_covered(path) for path in inside] == [True, True, False, False]
