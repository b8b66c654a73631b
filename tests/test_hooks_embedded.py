from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ckptsync.hooks import embedded, leaving
from ckptsync.hooks.saver import Saver
from tests.hooking import Said, Table, here, ranks, write_part


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
    worker = embedded.start(saver.here, str(tmp_path / "store"), trains.pid)
    try:
        left = leaving.wait(tmp_path / "out", saver.begun.train, 60, said, served=lambda _: worker.poll() is None)
        assert (left, said, worker.poll()) == ((), [], None)
        assert (tmp_path / "store" / "out" / "checkpoint-1" / "model.safetensors").read_text() == "weights 1 "
        trains.communicate()
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        trains.communicate()


def test_it_is_of_another_session_and_gives_way(tmp_path: Path) -> None:
    worker = embedded.start(committed(tmp_path / "out").here, str(tmp_path / "store"), os.getpid())
    try:
        assert os.getsid(worker.pid) == worker.pid
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) >= 10
    finally:
        worker.kill()
        worker.wait()


def test_what_it_cannot_do_is_in_its_log(tmp_path: Path) -> None:
    at = here(tmp_path / "out")
    at.spool.mkdir()
    worker = embedded.start(at, "nothing://such", os.getpid())
    assert worker.wait(60) == 2
    assert "nothing" in (at.spool / "embedded.log").read_text()
