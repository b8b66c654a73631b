"""``ckptsync run`` as a program."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from ckptsync.fleet.heartbeat import read
from ckptsync.stores.opening import open_store


def configured(tmp_path: Path, node: str = "n0") -> str:
    (tmp_path / "out").mkdir(exist_ok=True)
    path = tmp_path / f"{node}.yaml"
    path.write_text(f"node: {node}\nstore: {{url: {tmp_path}/store}}\nworker: {{runs: [{tmp_path}/out], scan_every: 200ms}}\n")
    return str(path)


def started(config: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "ckptsync", "run", "-c", config], stderr=subprocess.PIPE, text=True)


def until_started(child: subprocess.Popen[str]) -> None:
    assert child.stderr
    while "phase=started" not in child.stderr.readline():
        assert child.poll() is None


def test_it_serves_until_a_signal_and_exits_0(tmp_path: Path) -> None:
    with started(configured(tmp_path)) as child:
        until_started(child)
        begun = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert time.monotonic() - begun < 5


def test_the_second_worker_of_one_id_exits_2_and_the_first_goes_on(tmp_path: Path) -> None:
    with started(configured(tmp_path)) as first:
        until_started(first)
        (tmp_path / "store" / ".ckptsync" / "nodes").mkdir(exist_ok=True)
        while not list((tmp_path / "store" / ".ckptsync" / "nodes").iterdir()):
            time.sleep(0.02)
        with started(configured(tmp_path)) as second:
            assert second.wait(10) == 2
            assert second.stderr
            assert "another live worker has this id" in second.stderr.read()
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait(10) == 0


def test_a_worker_that_was_killed_is_no_rival(tmp_path: Path) -> None:
    with started(configured(tmp_path)) as first:
        until_started(first)
        time.sleep(0.3)
        first.kill()
    with started(configured(tmp_path)) as second:
        begun = time.monotonic()
        until_started(second)
        assert time.monotonic() - begun < 5
        second.send_signal(signal.SIGINT)
        assert second.wait(10) == 0


def test_a_worker_that_cannot_begin_is_2_and_does_not_look_alive(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    (tmp_path / "store" / "out").mkdir(parents=True)
    path.write_text(f"node: n0\nstore: {{url: {tmp_path}/store}}\nworker: {{runs: [{tmp_path}/store/out]}}\n")
    with started(str(path)) as child:
        assert child.wait(10) == 2
        assert child.stderr
        assert "inside the store" in child.stderr.read()
    told = read(open_store(f"{tmp_path}/store"), "n0", ("worker",))
    assert told
    assert told.stopped


def test_a_configuration_with_problems_is_2_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"store: {{url: {tmp_path}/store}}\nworker: {{runz: [/x]}}\n")
    assert main(["run", "-c", str(path)]) == 2
    assert f"{path}:2: worker.runz: unknown key (did you mean worker.runs?)" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
