"""Channels, into a real HTTP server and real programs."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from ckptsync.daemon import channels
from ckptsync.daemon.channels import Command, Webhook
from ckptsync.errors import CkptsyncError, StoreError
from tests.webhooks import hook

DOCUMENT = {"format": 1, "text": "ckptsync: 1 raised", "alarms": []}


def program(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(text)
    return (sys.executable, str(path))


def test_a_webhook_is_given_the_document_as_json() -> None:
    with hook() as there:
        Webhook(f"{there.url}/services/T0/secret?key=1").deliver(DOCUMENT)
        path, headers, document = there.taken.get_nowait()
    assert (path, document, headers["Content-Type"]) == ("/services/T0/secret?key=1", DOCUMENT, "application/json")
    assert headers["User-Agent"].startswith("ckptsync/")


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 302])
def test_whatever_is_no_success_is_a_failure_and_says_no_secret(status: int) -> None:
    with hook(status) as there, pytest.raises(StoreError, match=f"answered {status}") as caught:
        Webhook(f"{there.url}/secret").deliver(DOCUMENT)
    assert "secret" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__}"
    assert there.taken.qsize() == 1, "a redirection is not followed"


def test_a_webhook_that_nobody_serves_is_refused_in_the_systems_words_without_the_secret() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/secret"
        with pytest.raises(StoreError, match=r"webhook http://127.0.0.1: Connection refused") as caught:
            Webhook(url).deliver(DOCUMENT)
    assert "secret" not in str(caught.value)


def test_a_webhook_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PATIENCE", 0.2)
    with hook() as there:
        there.gate.clear()
        with pytest.raises(StoreError, match=r"no answer within 0.2 s"):
            Webhook(there.url).deliver(DOCUMENT)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "https://user:secret@/x", "http://[secret"])
def test_nothing_but_http_is_spoken_and_an_odd_url_is_no_traceback(url: str) -> None:
    with pytest.raises(CkptsyncError) as caught:
        Webhook(url).deliver(DOCUMENT)
    assert "secret" not in str(caught.value)


def test_a_command_reads_the_document_and_has_few_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    text = "import json, os, sys; json.dump([json.load(sys.stdin), sorted(os.environ), os.getcwd(), sys.argv[1:]], open(sys.argv[1], 'w'))"
    Command((*program(tmp_path / "p.py", text), str(tmp_path / "out"), "$HOME;")).deliver(DOCUMENT)
    document, names, folder, words = json.loads((tmp_path / "out").read_text())
    assert (document, folder, words[1]) == (DOCUMENT, "/", "$HOME;")
    assert "PATH" in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


def test_a_command_that_fails_is_not_there_or_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="exit status 3"):
        Command(program(tmp_path / "p.py", "raise SystemExit(3)")).deliver(DOCUMENT)
    with pytest.raises(StoreError, match="No such file"):
        Command((str(tmp_path / "gone"),)).deliver(DOCUMENT)
    monkeypatch.setattr(channels, "RUNS", 1.0)
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(StoreError, match="was killed"):
        Command(program(tmp_path / "slow.py", text)).deliver(DOCUMENT)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_does_not_read_is_no_failure(tmp_path: Path) -> None:
    Command(program(tmp_path / "p.py", "pass")).deliver({"text": "x" * 10**6})
