"""`ckptsync web`, as a process: what it says, where it listens, and where it refuses to."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.command_line import Cli
from tests.web.test_app import push

TOKEN = "a-token-of-this-test-0"


@contextmanager
def served(*words: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the command; give the URL that it says."""
    command = [sys.executable, "-m", "ckptsync", "web", "--json", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTSYNC_")}
    environment |= variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.kill()


def status(url: str, **headers: str) -> int:
    where = urlsplit(url)
    with closing(http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)) as asking:
        asking.request("GET", "/", headers={"Accept": "application/json", **headers})
        response = asking.getresponse()
        assert response.read()
        return response.status


def test_it_serves_a_store_until_it_is_interrupted(tmp_path: Path) -> None:
    push(str(tmp_path / "store"), "fsdp2", "node0")
    with served("--store", str(tmp_path / "store"), "--listen", "127.0.0.1:0") as (url, process):
        assert url.startswith("http://127.0.0.1:")
        assert status(url) == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_others_reach_it_with_a_token_only(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(str(tmp_path / "store"), "fsdp2", "node0")
    words = ("--store", str(tmp_path / "store"), "--listen", "0.0.0.0:0")
    monkeypatch.delenv("CKPTSYNC_WEB_TOKEN", raising=False)
    capsys.readouterr()
    assert "web.token is not set" in cli("web", *words, code=2).err
    for token in ("short", "with a space in the middle"):
        monkeypatch.setenv("CKPTSYNC_WEB_TOKEN", token)
        assert token not in cli("web", *words, code=2).err
    with served(*words, CKPTSYNC_WEB_TOKEN=TOKEN) as (url, _):
        assert TOKEN not in url
        assert status(url) == 401
        assert status(url, Authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999", "unix:here", "127.x.example:1"])
def test_an_address_that_is_none_is_a_usage_error(listen: str, tmp_path: Path, cli: Cli) -> None:
    push(str(tmp_path / "store"), "fsdp2", "node0")
    cli("web", "--store", tmp_path / "store", "--listen", listen, code=2)
