"""A real head over a real store: what it says to Prometheus, by Apprise, and to `ckptsync
status`.
"""

import json
import os
import signal
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
from tests.support.ports import free_port
from tests.support.small_store import SHARD, flip, make
from tests.support.waiting import until
from tests.support.webhook_server import hook

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
