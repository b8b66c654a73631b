from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ckptsync.hooks import embedded, leaving
from ckptsync.hooks.saver import Saver
from tests.hooking import Said, Table, here, ranks, write_part
from tests.standing import ROOT, ran
from tests.ticks import until


def training() -> subprocess.Popen[bytes]:
    """A process that trains until its input ends."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def committed(output_dir: Path) -> Saver:
    (saver,) = ranks(Table(), Said(), output_dir)
    write_part(saver, 1)
    saver.remember(1)
    saver.commit(1)
    saver.leave()
    return saver


def test_the_embedded_worker_sends_and_ends_after_the_training(tmp_path: Path) -> None:
    saver, said, trains = committed(tmp_path / "out"), Said(), training()
    worker = embedded.start(saver.here, str(tmp_path / "store"), "", trains.pid)
    try:
        left = leaving.wait(tmp_path / "out", {saver.begun.train}, 60, said, served=lambda _: worker.poll() is None)
        assert (left, said, worker.poll()) == ((), [], None)
        assert (tmp_path / "store" / "out" / "checkpoint-1" / "model.safetensors").read_text() == "weights 1 "
        trains.communicate()
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        trains.communicate()


def test_it_is_of_another_session_and_gives_way(tmp_path: Path) -> None:
    worker = embedded.start(committed(tmp_path / "out").here, str(tmp_path / "store"), "", os.getpid())
    try:
        assert os.getsid(worker.pid) == worker.pid
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) >= 10
    finally:
        worker.kill()
        worker.wait()


def test_what_it_cannot_do_is_in_its_log(tmp_path: Path) -> None:
    at = here(tmp_path / "out")
    at.spool.mkdir()
    worker = embedded.start(at, "nothing://such", "", os.getpid())
    assert worker.wait(60) == 2
    assert "nothing" in (at.spool / "embedded.log").read_text()
    error, _, hint = embedded.last_error(at.spool).partition("; hint: ")
    said = (at.spool / "embedded.log").read_text().splitlines()
    assert error in said[-2]
    assert hint in said[-1]


SAID = {
    "ckptsync: error: no such store\nckptsync: hint: make it\n": "no such store; hint: make it",
    "ckptsync: error: of the one before\nckptsync: hint: no\nTraceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'msgspec'\n": (
        f"ModuleNotFoundError: No module named 'msgspec'; hint: {sys.executable} -m pip install ckptsync brings what it needs"
    ),
    "ckptsync: error: two problems\n  this\n  that\n": "two problems",
    "ckptsync: error: of the one before\nTraceback (most recent call last):\n  File\nTypeError: 1\n": "TypeError: 1",
    'ckptsync: error: of the one before\n{"message": "sent"}\n': "",
    "": "",
}


@pytest.mark.parametrize(("log", "reason"), SAID.items())
def test_the_reason_is_the_last_thing_it_said(spool: Path, log: str, reason: str) -> None:
    (spool / "embedded.log").write_text("x" * 99999 + "\n" + log if log else "")
    assert embedded.last_error(spool) == reason


def sent(output_dir: Path, store: Path | str, run: str = "") -> None:
    """What is kept there."""
    saver, said = committed(output_dir), Said()
    worker = embedded.start(saver.here, str(store), run, os.getpid())
    try:
        left = leaving.wait(output_dir, {saver.begun.train}, 60, said, served=lambda _: worker.poll() is None)
        assert (left, said) == ((), []), (saver.here.spool / "embedded.log").read_text()
    finally:
        worker.kill()
        worker.wait()


def test_what_it_is_told_is_not_overridden_by_the_trainings_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTSYNC_STORE", "other")
    monkeypatch.setenv("CKPTSYNC_ROLES", "head")
    sent(tmp_path / "out", "store")
    assert (tmp_path / "store" / "out" / "checkpoint-1" / "model.safetensors").exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["out [1]", "*", "out?"])
def test_a_directory_of_any_name_is_meant_literally(tmp_path: Path, name: str) -> None:
    sent(tmp_path / name, tmp_path / "store")
    assert (tmp_path / "store" / name / "checkpoint-1" / "model.safetensors").exists()


def test_a_run_can_have_another_name_in_the_store_than_on_the_disk(tmp_path: Path) -> None:
    sent(tmp_path / "_out", tmp_path / "store", "qwen-sft")
    assert (tmp_path / "store" / "qwen-sft" / "checkpoint-1" / "model.safetensors").exists()


def test_code_beside_the_model_is_none_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("queue.py", "yaml.py", "ckptsync.py"):
        (tmp_path / "out" / name).write_text("raise SystemExit('imported from the output directory')")
    sent(tmp_path / "out", tmp_path / "store")


def test_packages_that_are_installed_do_not_come_before_the_standard_library(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "pathlib.py").write_text("raise ImportError('a backport for Python 2, which many environments have')")
    (site / "ckptsync").symlink_to(ROOT / "ckptsync")
    child = "subprocess.run([sys.executable, '-c', 'import ckptsync.hooks.turn'], env=_environment(), cwd='/')"
    program = f"import subprocess, sys; from ckptsync.hooks.embedded import _environment; print({child}.returncode)"
    assert ran("-c", program, python=str(tmp_path / "bin" / "python"), path=(), cwd=tmp_path).stdout == "0\n"


def test_another_worker_that_is_still_at_work_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSYNC_NODE", "node")
    saver, said = committed(tmp_path / "out"), Said()
    with (saver.here.spool / "worker-node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        worker = embedded.start(saver.here, str(tmp_path / "store"), "", os.getpid())
        log = saver.here.spool / "embedded.log"
        assert until(lambda: "waiting: another worker is at work" in log.read_text() or worker.poll() is not None, 60)
        assert not until(lambda: worker.poll() is not None, 2), log.read_text()
    try:
        assert leaving.wait(tmp_path / "out", {saver.begun.train}, 60, said, served=lambda _: worker.poll() is None) == ()
    finally:
        worker.kill()
        worker.wait()
