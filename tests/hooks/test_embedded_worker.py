from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.hooks import embedded_worker
from ckptsync.hooks.embedded_worker import (
    EmbeddedWorker,
    await_turn,
    claim_node,
    parse_wait,
)
from ckptsync.hooks.trainer_saves import TrainerSaves
from ckptsync.install_commands import install_extra
from ckptsync.records.store_paths import checked_node
from ckptsync.service.process_control import Locks
from ckptsync.spool import markers
from ckptsync.spool.pins import create_pin
from tests.hooks.training import Said, ranks, save
from tests.support.stand_in_programs import ROOT, ran
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("text", "wait"),
    [("", 0.0), ("600", 600.0), ("0", 0.0), ("1.5", 1.5), ("10m", 600.0), ("1h30m", 5400.0)],
)
def test_a_wait_is_seconds_or_a_duration(text: str, wait: float) -> None:
    assert parse_wait(text) == parse_wait(wait) == wait


@pytest.mark.parametrize(
    "wait", ["soon", "-5", -5.0, "1e9", "nan", float("inf"), ".", "²", "9" * 400, None]
)
def test_any_other_wait_is_refused_by_name(wait: object) -> None:
    with pytest.raises(ConfigError, match="CKPTSYNC_WAIT") as refused:
        parse_wait(wait)  # type: ignore[arg-type]
    assert refused.value.hint


def committed(output_dir: Path) -> TrainerSaves:
    (saver,) = ranks(output_dir)
    save(saver, step=1)
    saver.commit(1)
    saver.leave()
    return saver


@contextlib.contextmanager
def running(output_dir: Path, store: Path | str, run: str = "") -> Iterator[EmbeddedWorker]:
    """The embedded worker that this process starts for an output directory."""
    embedded_worker.keep_running(output_dir, str(store), run)
    worker = embedded_worker._workers.pop((os.getpid(), output_dir))
    try:
        yield worker
    finally:
        if worker.is_running():
            os.kill(worker.pid, signal.SIGKILL)
        assert until(lambda: not worker.is_running())


TRAINING = """
import sys
from pathlib import Path
from ckptsync.hooks import embedded_worker
embedded_worker.keep_running(Path(sys.argv[1]), sys.argv[2])
(worker,) = embedded_worker._workers.values()
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_the_embedded_worker_sends_and_ends_after_the_training(tmp_path: Path) -> None:
    saver = committed(tmp_path / "out")
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "out"), str(tmp_path / "store")]
    training = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert training.stdout is not None
    pid = int(training.stdout.readline())
    worker = EmbeddedWorker(pid, markers.start_time(pid), 0.0)
    try:
        assert until(lambda: not embedded_worker.list_unstored(tmp_path / "out"))
        assert worker.is_running()
        assert os.getsid(worker.pid) == worker.pid
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == min(niceness + 10, 19)
        stored = tmp_path / "store" / "out" / "checkpoint-1" / "model.safetensors"
        assert stored.read_text() == "weights 1 "
    finally:
        training.communicate()
        assert until(lambda: not worker.is_running())
    assert embedded_worker.read_log_problem(saver.spool) == ""


BEFORE = "ckptsync: error: of the one before\n"
TRACEBACK = "Traceback (most recent call last):\n  File\n"
SAID = {
    "ckptsync: error: no such store\nckptsync: hint: make it\n": "no such store; hint: make it",
    f"{BEFORE}ckptsync: hint: no\n{TRACEBACK}ModuleNotFoundError: No module named 'msgspec'\n": (
        f"ModuleNotFoundError: No module named 'msgspec'; hint: {install_extra('')}"
    ),
    "ckptsync: error: two problems\n  this\n  that\n": "two problems",
    f"{BEFORE}{TRACEBACK}TypeError: 1\n": "TypeError: 1",
    BEFORE + '{"message": "sent"}\n': "",
    'ckptsync: error: old\n{"phase": "waiting", "error": "no key", "hint": "add it"}\n'
    'text\n{"phase": "waiting"}\n': "no key; hint: add it",
    **dict.fromkeys(
        (
            f'{{"phase": "waiting", "error": "no key"}}\n{{"phase": "{phase}"}}\n{{}}\n'
            for phase in ("starting", "started", "stopped")
        ),
        "",
    ),
    "": "",
}


@pytest.mark.parametrize(("log", "reason"), SAID.items())
def test_the_reason_is_the_last_thing_it_said(spool: Path, log: str, reason: str) -> None:
    (spool / "embedded.log").write_text("x" * 99999 + "\n" + log if log else "")
    assert embedded_worker.read_log_problem(spool) == reason


def sent(output_dir: Path, store: Path | str, run: str = "") -> None:
    """What is kept there."""
    saver = committed(output_dir)
    with running(output_dir, store, run) as worker:
        assert until(
            lambda: not embedded_worker.list_unstored(output_dir) or not worker.is_running()
        )
        assert embedded_worker.list_unstored(output_dir) == (), (
            saver.spool / "embedded.log"
        ).read_text()


def test_what_it_is_told_is_not_overridden_by_the_trainingschild_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTSYNC_STORE", "other")
    monkeypatch.setenv("CKPTSYNC_ROLES", "head")
    sent(tmp_path / "out", "store")
    assert (tmp_path / "store" / "out" / "checkpoint-1" / "model.safetensors").exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "run", "stored"),
    [("out [1]*?", "", "out [1]*?"), ("_out", "sft", "sft"), ("_out", "sft-{dir}", "sft-_out")],
)
def test_a_directory_of_any_name_is_a_run_of_its_own_or_a_given_name(
    tmp_path: Path, name: str, run: str, stored: str
) -> None:
    out = tmp_path / name
    out.mkdir()
    for module in ("queue.py", "yaml.py", "ckptsync.py"):  # code beside the model is none of ours
        (out / module).write_text("raise SystemExit('imported from the output directory')")
    sent(out, tmp_path / "store", run)
    assert (tmp_path / "store" / stored / "checkpoint-1" / "model.safetensors").exists()


def test_installed_packages_do_not_come_before_the_standard_library(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "pathlib.py").write_text(
        "raise ImportError('a backport for Python 2, which many environments have')"
    )
    (site / "ckptsync").symlink_to(ROOT / "ckptsync")
    program = """
import subprocess, sys
from ckptsync.hooks.embedded_worker import child_environment
child = [sys.executable, "-c", "import ckptsync.hooks.embedded_worker"]
print(subprocess.run(child, env=child_environment(), cwd="/").returncode)
"""
    python = str(tmp_path / "bin" / "python")
    assert ran("-c", program, python=python, path=(), cwd=tmp_path).stdout == "0\n"


def test_another_worker_at_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSYNC_NODE", "node")
    saver = committed(tmp_path / "out")
    log = saver.spool / "embedded.log"
    with contextlib.ExitStack() as stack:
        with (saver.spool / "worker-node.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            worker = stack.enter_context(running(tmp_path / "out", tmp_path / "store"))
            assert until(
                lambda: (
                    "waiting: another worker is at work" in log.read_text()
                    or not worker.is_running()
                )
            )
            assert not until(lambda: not worker.is_running(), 0.5), log.read_text()
        assert until(lambda: not embedded_worker.list_unstored(tmp_path / "out"))


@pytest.mark.parametrize("ends_first", ["worker", "training"])
def test_after_the_training_another_worker_is_not_waited_for_long(
    spool: Path, ends_first: str
) -> None:
    trains = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    answers = list[bool]()
    with (spool / "worker-node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=lambda: answers.append(await_turn(spool, trains.pid, 0.1))
        )
        waiting.start()
        if ends_first == "training":
            waiting.join(1)
            assert waiting.is_alive(), (
                "while the training lives it waits longer than it is patient afterwards"
            )
            trains.communicate()
            waiting.join(60)
    waiting.join(60)
    trains.communicate()
    assert answers == [ends_first == "worker"]


CLAIM = """
import os, sys
from pathlib import Path
from ckptsync.hooks.embedded_worker import claim_node
print(claim_node("node", sys.argv[1], Path("/a/_ckptsync")), flush=True)
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('become another', flush=True); \
sys.stdin.read()"])
"""


def test_of_two_trainings_of_a_machine_the_first_has_the_nodes_own_id(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    assert [holder.stdout.readline() for _ in "12"] == ["node\n", "become another\n"]
    one, other = (claim_node("node", str(tmp_path), Path(f"/{name}/_ckptsync")) for name in "bc")
    assert checked_node(one).startswith("node-")
    assert one != other
    assert one == claim_node("node", str(tmp_path), Path("/b/_ckptsync")), (
        "the same when it begins again"
    )
    assert claim_node("node", f"{tmp_path}/other", Path("/b/_ckptsync")) == "node"
    assert claim_node("n" * 100, str(tmp_path), Path("/b/_ckptsync")) == "n" * 100
    assert checked_node(claim_node("n" * 100, str(tmp_path), Path("/b/_ckptsync")))
    # a worker of this very directory that is about to end is waited for
    (tmp_path / "worker-node.lock").touch()
    assert claim_node("node", str(tmp_path), tmp_path, 0.0) != "node"
    ending = threading.Timer(1.0, holder.communicate)
    ending.start()
    assert claim_node("node", str(tmp_path), tmp_path, 600.0) == "node"
    ending.join()


def test_what_cannot_be_started_is_an_error_and_another_process_is_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="/bin/false: could not be started; see"):
        embedded_worker.keep_running(tmp_path, str(tmp_path / "store"))
    assert not EmbeddedWorker(os.getpid(), "1", 0.0).is_running()


# --- the wait for the store


def test_a_worker_at_work_is_seen_and_not_disturbed(spool: Path) -> None:
    locks = Locks("n0")
    assert not embedded_worker.is_served(spool)
    locks.hold(spool)
    assert embedded_worker.is_served(spool)
    locks.close()
    assert not embedded_worker.is_served(spool)
    locks.hold(spool)
    locks.close()


def test_waiting_ends_when_the_store_has_everything_or_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_worker, "RESTART", 1e-6)  # a worker is at work all the while
    said, locks = Said(), Locks("n0")
    pin = committed(tmp_path).spool / "pins" / "checkpoint-1.0"
    assert create_pin(tmp_path, "checkpoint-2", 0, "n0"), "a worker's own, which may never be whole"
    assert embedded_worker.list_unstored(tmp_path) == ("checkpoint-1.0",)
    locks.hold(tmp_path / "_ckptsync")
    embedded_worker.wait(tmp_path, time.monotonic(), said)
    assert said == ["no longer waiting: not uploaded yet: checkpoint-1.0"]
    said.clear()
    thread = threading.Thread(
        target=embedded_worker.wait, args=(tmp_path, time.monotonic() + 60, said)
    )
    thread.start()
    (pin / "stored").touch()
    thread.join(60)
    locks.close()
    assert (thread.is_alive(), embedded_worker.list_unstored(tmp_path), said) == (False, (), [])


def test_where_no_worker_comes_back_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    committed(tmp_path)
    monkeypatch.setattr(embedded_worker, "RESTART", 0)
    embedded_worker.wait(tmp_path, time.monotonic() + 3600, said)
    assert [line.partition(":")[0] for line in said] == ["not waiting"]


def test_a_worker_whose_end_was_expected_is_started_again_at_once(tmp_path: Path) -> None:
    output_dir, store, key = tmp_path / "out", str(tmp_path / "store"), os.getpid()
    output_dir.mkdir()
    embedded_worker.keep_running(output_dir, store)
    first = embedded_worker._workers[key, output_dir]
    try:
        os.kill(first.pid, signal.SIGKILL)
        assert until(lambda: not first.is_running())
        embedded_worker.keep_running(output_dir, store)
        assert embedded_worker._workers[key, output_dir] == first, "not twice in a minute"
        embedded_worker.expect_end(output_dir)
        embedded_worker.keep_running(output_dir, store)
        assert embedded_worker._workers[key, output_dir].pid != first.pid
    finally:
        last = embedded_worker._workers.pop((key, output_dir))
        with contextlib.suppress(ProcessLookupError):
            os.kill(last.pid, signal.SIGKILL)
        assert until(lambda: not last.is_running())
