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
from ckptsync.hooks import embedded, leaving, ray_node
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
    told = [RunConfig(run["path"], run.get("name", "")) for run in ray_node.runs(ray, "sft")]
    found = output_directories(told, str(tmp_path / "store"))
    assert found.problems == ()
    assert {run.name: run.path for run in found.runs} == {"sft": str(ray), "sft-out": str(ray / "out")}


@pytest.mark.parametrize(
    ("name", "out"), [("_x", "artifacts-_x-out"), ("[1]", "artifacts-[1]-out"), ("!a*", "artifacts-!a*-out"), ("a b", "a b-out")]
)
def test_outputs_of_a_run_with_an_odd_name_are_found_too(tmp_path: Path, name: str, out: str) -> None:
    for run in (name, "x", "1", "ab"):
        write(tmp_path / "artifacts" / run / "out" / "checkpoint-1")
    told = [RunConfig(run["path"], run.get("name", "")) for run in ray_node.runs(tmp_path / "artifacts" / name, name)]
    found = output_directories(told, str(tmp_path / "store"))
    assert found.problems == ()
    assert {run.name for run in found.runs} == {ray_node.plain(name), out}


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


def test_what_keeps_a_worker_from_its_work_is_heard_while_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nosuch")  # as where only the driver has keys
    directory, trains = tmp_path / "artifacts" / "sft", training()
    for _ in range(2):
        since = ray_node.log_size(directory)
        worker = ray_node.start("s3://bucket/x", directory, "sft", trains.pid)
        said = ray_node.last_words(worker, directory, since)
        assert said.count("error: s3://bucket/x: The config profile (nosuch) could not be found; hint: ") == 1
    assert trains.poll() is None
    trains.communicate()


def test_it_is_no_child_of_the_process_that_starts_it(spool: Path) -> None:
    worker = embedded.start_apart(
        [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(60)"], spool / "log", spool
    )
    try:
        children = {int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
        assert worker.pid not in children
        assert os.getsid(worker.pid) == worker.pid
        assert worker.poll() is None
    finally:
        os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid, worker.began)


def test_a_process_that_cannot_be_started_is_an_error(spool: Path) -> None:
    with pytest.raises(OSError, match="could not be started"):
        embedded.start_apart([str(spool / "none")], spool / "log", spool)


def test_of_several_that_begin_at_once_one_works_and_the_next_comes_after_it(tmp_path: Path) -> None:
    """As where Ray replaces single workers: each of them is the first of its own, on one node."""
    directory, train = tmp_path / "artifacts" / "sft", [training(), training()]
    workers = [ray_node.start(str(tmp_path / "store"), directory, "sft", one.pid) for one in train]
    try:
        assert until(lambda: leaving.is_served(directory / "_ckptsync"))
        first = 0 if is_at_work(workers[0]) else 1
        train[first].communicate()
        assert gone(workers[first].pid, workers[first].began), (directory / "_ckptsync" / "embedded.log").read_text()
        assert until(lambda: is_at_work(workers[1 - first]))
    finally:
        for one, worker in zip(train, workers, strict=True):
            one.communicate()
            if marks.began(worker.pid) == worker.began:
                os.kill(worker.pid, signal.SIGKILL)


def is_at_work(worker: embedded.Apart) -> bool:
    """Whether it is a service by now."""
    told = Path(f"/proc/{worker.pid}/cmdline").read_bytes() if marks.began(worker.pid) == worker.began else b""
    return b"--until-gone" in told.split(b"\0")
