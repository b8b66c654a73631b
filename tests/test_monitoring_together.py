"""A real head over a real store: what it says to Prometheus, by Apprise, and to `ckptsync
status`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptsync
from ckptsync.cli.main import main
from ckptsync.stores.opening import create_store
from tests.support.ports import free_port
from tests.support.small_store import SHARD, flip, make
from tests.support.waiting import until
from tests.support.webhook_server import hook
from tests.support.worker_in_process import push_now

pytest.importorskip("prometheus_client")
DATA = Path(ckptsync.__file__).parent / "demo_data"
SECRET = "T0/B0/very-secret"


@contextmanager
def daemon(folder: Path, text: str) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "config.yaml").write_text(text)
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "ckptsync", "run", "-c", str(folder / "config.yaml")],
            stderr=log,
            env={**os.environ, "CACHE_DIRECTORY": str(folder / "cache")},
        )
    try:
        yield child
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0, (folder / "log").read_text()
    finally:
        child.kill()
        child.wait()


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()
    except OSError:
        return 0, ""


def test_a_head_tells_alarms_and_a_channel_that_fails_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, port = make(tmp_path / "store"), free_port()
    flip(store / "fsdp2" / SHARD)
    with hook(500) as there:
        text = (
            "node: boss\n"
            "roles: [head, verifier]\n"
            f"store: {{url: {store}}}\n"
            "head: {every: 200ms}\n"
            "verify: {period: 10ms, tick: 200ms}\n"
            f"metrics: {{listen: '127.0.0.1:{port}'}}\n"
            f"alerts: {{urls: ['{there.json_url(SECRET)}'], on: [damage]}}\n"
        )
        with daemon(tmp_path, text):
            assert there.next()["message"].startswith("CRITICAL damaged: fsdp2/checkpoint-4: ")
            for line in (
                'ckptsync_alarms{code="damaged",kind="damage",severity="critical"} 1.0',
                'ckptsync_run_checkpoints{run="fsdp2",state="damaged"} 1.0',
                'ckptsync_alerts_failed_total{channel="json-1"} 1.0',
                "ckptsync_errors 1.0",
            ):
                assert until(lambda line=line: line in page(port, "/metrics")[1]), line  # type: ignore[misc]
            assert until((store / ".ckptsync" / "nodes" / "boss~head.json").exists)
            capsys.readouterr()
            assert main(["status", "--store", str(store), "--json"]) == 0
            seen = json.loads(capsys.readouterr().out)
            assert (seen["alarms"][0]["code"], seen["nodes"][0]["verifies"]) == ("damaged", 0.01)
    log = (tmp_path / "log").read_text()
    assert '"phase": "alarm", "code": "damaged"' in log
    assert SECRET not in log
    assert not any(SECRET in path.read_text() for path in (tmp_path / "cache").rglob("*.json"))


def test_a_worker_tells_of_itself_alone(tmp_path: Path) -> None:
    port = free_port()
    text = (
        "node: n0\n"
        f"store: {{url: {tmp_path}/store}}\n"
        f"worker: {{runs: ['{tmp_path}/out'], quiet: 0, unmarked: 0, scan_every: 200ms}}\n"
        f"metrics: {{listen: '127.0.0.1:{port}'}}\n"
    )
    create_store(str(tmp_path / "store"))
    (tmp_path / "out").mkdir()
    shutil.copytree(DATA / "zero3" / "node0", tmp_path / "out", dirs_exist_ok=True)
    with daemon(tmp_path, text) as child:
        assert until(lambda: "ckptsync_sent_bytes_total" in page(port, "/metrics")[1])
        assert until(
            lambda: (
                f'ckptsync_disk_size_bytes{{path="{tmp_path}/out"}}' in page(port, "/metrics")[1]
            )
        )
        assert page(port, "/healthz")[0] == 200
        assert "ckptsync_run_checkpoints" not in page(port, "/metrics")[1], (
            "only a head looks at all of the store"
        )
        assert child.poll() is None


def test_a_port_that_is_taken_stops_nothing_and_is_seen_in_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make(tmp_path / "store")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        text = (
            "node: boss\n"
            "roles: [head]\n"
            f"store: {{url: {store}}}\n"
            "head: {every: 200ms}\n"
            f"metrics: {{listen: '{where}'}}\n"
        )
        with daemon(tmp_path, text):
            told = f"listen: metrics.listen: {where}: Address already in use"
            beat = store / ".ckptsync" / "nodes" / "boss~head.json"
            assert until(lambda: "Address already in use" in (tmp_path / "log").read_text(), 300)
            push_now(DATA / "zero3" / "node1", create_store(str(store)), "node1", "zero3")
            # a job that begins is told at once, and with it the error
            assert until(lambda: beat.exists() and told in beat.read_text(), 300)
            capsys.readouterr()
            assert main(["status", "--store", str(store)]) == 0
            assert f"error  {told}" in capsys.readouterr().out
