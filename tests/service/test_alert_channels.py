"""What is told, tried again, and remembered: over real HTTP."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.service import alert_channels
from ckptsync.service.alert_channels import FIRST, Command, Sender, Webhook
from ckptsync.status.alarms import HOLD, KINDS, Alarm, Terms
from tests.support.webhook_server import Hook, hook

HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "bytes differ", "repair it")
AWAY = Alarm("store-away", "store", "critical", 5.0, "no answer", "look")
faults: list[BaseException] = []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's own directory for what may be lost."""
    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path}/cache")
    return tmp_path / "cache"


@pytest.fixture
def there() -> Iterator[Hook]:
    with hook() as found:
        yield found


def postman(there: Hook, store: str = "/store") -> Sender:
    terms = Terms(KINDS, 3600.0)
    return Sender(Webhook(f"{there.url}/secret"), terms, (store, "boss"), faults.append)


def until(is_so: Callable[[], object]) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("alert-"):
            thread.join(60)
    assert is_so()


def told_once(there: Hook) -> Sender:
    """A sender that has delivered one alarm."""
    man = postman(there)
    man.offer([HURT], 1000.0)
    until(lambda: man.channel.delivered == 1)
    return man


def test_it_tells_once_and_says_when_it_is_over(there: Hook) -> None:
    man = told_once(there)
    told = there.next()
    alarm = told["alarms"][0]
    assert (told["store"], told["head"]) == ("/store", "boss")
    assert (alarm["status"], alarm["key"]) == ("raised", "damaged run/checkpoint-1")
    man.offer([HURT], 1030.0)
    man.offer([], 1060.0)
    man.offer([], 1060.0 + HOLD)
    assert there.next()["text"] == "ckptsync: 1 resolved (/store)\nOVER damaged: run/checkpoint-1"


def test_a_webhook_that_hangs_holds_nobody_up_and_what_came_meanwhile_follows(there: Hook) -> None:
    there.gate.clear()
    man = postman(there)
    man.offer([HURT], 1000.0)
    there.next()
    for now in (1030.0, 1060.0):
        man.offer([HURT, replace(HURT, subject="other")], now)
    assert there.taken.empty()
    there.gate.set()
    until(lambda: man.channel.delivered == 1)
    man.offer([HURT, replace(HURT, subject="other")], 1090.0)
    assert [a["subject"] for a in there.next()["alarms"]] == ["other"]


def test_what_failed_is_seen_and_tried_again_later_and_less_and_less_often(there: Hook) -> None:
    there.answer = 500
    man = postman(there)
    man.offer([HURT], 1000.0)
    until(lambda: man.channel.failed == 1)
    assert man.error == "alerts: webhook http://127.0.0.1: HTTP status 500"
    man.offer([HURT], 1000.0 + FIRST - 1)
    until(lambda: there.taken.qsize() == 1)
    man.offer([HURT], 1000.0 + FIRST + 1)
    until(lambda: man.channel.failed == 2)
    man.offer([HURT], 1000.0 + 2 * FIRST + 2)
    until(lambda: there.taken.qsize() == 2)
    there.answer = 200
    man.offer([HURT], 1000.0 + 4 * FIRST)
    until(lambda: man.channel.delivered == 1)
    assert man.error == ""


def test_a_restart_repeats_nothing_and_still_says_what_is_over(there: Hook, cache: Path) -> None:
    told_once(there)
    there.next()
    second = postman(there)
    second.offer([HURT], 1030.0)
    second.offer([], 1060.0)
    second.offer([], 1060.0 + HOLD)
    assert there.next()["alarms"][0]["status"] == "resolved"
    until(lambda: second.channel.delivered == 1)
    [path] = cache.iterdir()
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [b"{", b"[1]", b'{"\xff":{}}', b"[" * 100_000, b'{"x": {"alarm": {}}}']
)
def test_without_its_file_or_with_another_stores_it_tells_once_more(
    there: Hook, cache: Path, damage: bytes
) -> None:
    told_once(there)
    [path] = cache.iterdir()
    postman(there, "/another").offer([HURT], 1000.0)
    there.next()
    assert there.next()["store"] == "/another"
    path.write_bytes(damage)
    postman(there).offer([HURT], 1010.0)
    assert there.next()["alarms"][0]["status"] == "raised"


def test_an_alarm_of_another_version_is_forgotten(there: Hook, cache: Path) -> None:
    told_once(there)
    [path] = cache.iterdir()
    path.write_text(path.read_text().replace('"code":"damaged"', '"code":"unknown"'))
    postman(there).offer([], 5000.0)
    assert faults == []


def test_a_cache_that_cannot_be_written_or_is_nowhere_is_no_failure(
    there: Hook, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(_: str) -> Path:
        raise RuntimeError("no home")

    cache.write_text("no directory")
    told_once(there)
    monkeypatch.setattr(alert_channels, "cache_path", nowhere)
    told_once(there)


def test_a_store_that_is_away_ends_no_alarm(there: Hook) -> None:
    man = told_once(there)
    there.next()
    man.offer([*man.active(), AWAY], 1030.0)
    until(lambda: man.channel.delivered == 2)
    assert [a["code"] for a in there.next()["alarms"]] == ["store-away"]
    man.offer([*man.active(), AWAY], 1030.0 + 10 * HOLD)
    assert there.taken.empty()
    man.offer([HURT], 3000.0)
    man.offer([HURT], 3000.0 + HOLD)
    [over] = there.next()["alarms"]
    assert (over["code"], over["status"]) == ("store-away", "resolved")


DOCUMENT = {"format": 1, "text": "ckptsync: 1 raised", "alarms": []}
MESSAGE = json.dumps(DOCUMENT).encode()


def program(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(text)
    return (sys.executable, str(path))


def test_a_webhook_is_given_the_document_as_json(there: Hook) -> None:
    Webhook(f"{there.url}/services/T0/secret?key=1").deliver(MESSAGE)
    path, headers, document = there.taken.get_nowait()
    assert (path, document) == ("/services/T0/secret?key=1", DOCUMENT)
    assert headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("ckptsync/")


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 302])
def test_whatever_is_no_success_is_a_failure_and_says_no_secret(there: Hook, status: int) -> None:
    there.answer = status
    with pytest.raises(StoreError, match=f"HTTP status {status}") as caught:
        Webhook(f"{there.url}/secret").deliver(MESSAGE)
    assert "secret" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__}"
    assert there.taken.qsize() == 1, "a redirection is not followed"


def test_a_webhook_that_nobody_serves_or_that_does_not_answer_is_given_up_without_the_secret(
    there: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/secret"
        refused = r"webhook http://127.0.0.1: Connection refused"
        with pytest.raises(StoreError, match=refused) as caught:
            Webhook(url).deliver(MESSAGE)
    assert "secret" not in str(caught.value)
    monkeypatch.setattr(alert_channels, "ANSWERS_WITHIN", 0.2)
    there.gate.clear()
    with pytest.raises(StoreError, match=r"no answer within 0.2 s"):
        Webhook(there.url).deliver(MESSAGE)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "https://user:secret@/x", "http://[secret"]
)
def test_nothing_but_http_is_spoken_and_an_odd_url_is_no_traceback(url: str) -> None:
    with pytest.raises(CkptsyncError) as caught:
        Webhook(url).deliver(MESSAGE)
    assert "secret" not in str(caught.value)


def test_a_command_reads_the_document_and_has_few_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    text = (
        "import json, os, sys; json.dump([json.load(sys.stdin), sorted(os.environ), os.getcwd(),"
        " sys.argv[1:]], open(sys.argv[1], 'w'))"
    )
    Command((*program(tmp_path / "p.py", text), str(tmp_path / "out"), "$HOME;")).deliver(MESSAGE)
    document, names, folder, words = json.loads((tmp_path / "out").read_text())
    assert (document, folder, words[1]) == (DOCUMENT, "/", "$HOME;")
    assert "PATH" in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


def test_a_command_that_fails_is_not_there_or_takes_too_long_says_so_and_one_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Command(program(tmp_path / "p.py", "pass")).deliver(b"x" * 10**6)
    with pytest.raises(StoreError, match="exit status 3"):
        Command(program(tmp_path / "p.py", "raise SystemExit(3)")).deliver(MESSAGE)
    with pytest.raises(StoreError, match="No such file"):
        Command((str(tmp_path / "gone"),)).deliver(MESSAGE)
    monkeypatch.setattr(alert_channels, "RUNS_WITHIN", 1.0)
    pid = tmp_path / "pid"
    text = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(StoreError, match="was killed"):
        Command(program(tmp_path / "slow.py", text)).deliver(MESSAGE)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
