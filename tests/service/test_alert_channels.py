"""What is told, tried again, and remembered; and what Apprise and commands deliver."""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli.main import main
from ckptsync.config.loading import read
from ckptsync.errors import ConfigError, StoreError
from ckptsync.install_commands import install_extra
from ckptsync.service import alert_channels
from ckptsync.service.alert_channels import (
    FIRST,
    PAUSE,
    AppriseUrl,
    Command,
    Sender,
    open_channels,
)
from ckptsync.status.alarms import HOLD, KINDS, Alarm, Terms
from tests.service.test_jobs import is_alive
from tests.support import waiting
from tests.support.webhook_server import Hook, hook

HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "bytes differ", "repair it")
AWAY = Alarm("store-away", "store", "critical", 5.0, "no answer", "look")
faults: list[BaseException] = []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's own directory for what may be lost."""
    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path}/cache")
    monkeypatch.setattr(alert_channels, "RUNS_WITHIN", 300.0)  # a busy machine starts it late
    return tmp_path / "cache"


class Inbox:
    """A receiver: ``taken`` are the documents that came; while ``gate`` is not set, none is
    answered; with a ``failure``, each fails.
    """

    name, target, failure = "inbox", "here", ""

    def __init__(self) -> None:
        self.taken: queue.Queue[Any] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()

    def deliver(self, message: Mapping[str, Any]) -> None:
        self.taken.put(message)
        assert self.gate.wait(60)
        if self.failure:
            raise StoreError(self.failure)

    def next(self) -> Any:
        return self.taken.get(timeout=60)


@pytest.fixture
def there() -> Inbox:
    return Inbox()


@pytest.fixture
def web() -> Iterator[Hook]:
    with hook() as found:
        yield found


def postman(there: Inbox, store: str = "/store") -> Sender:
    return Sender(there, Terms(KINDS, 3600.0), (store, "boss"), faults.append)


def until(is_so: Callable[[], object]) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("alert-"):
            thread.join(60)
    assert is_so()


def told_once(there: Inbox) -> Sender:
    man = postman(there)
    man.offer([HURT], 1000.0)
    until(lambda: man.channel.delivered == 1)
    return man


def test_a_channel_that_hangs_holds_nobody_up_and_what_came_meanwhile_follows(there: Inbox) -> None:
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


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_failed_is_seen_and_tried_again_later_and_less_and_less_often(
    there: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.failure = "HTTP status 500"
    man = postman(there)
    man.offer([HURT], 1000.0)
    until(lambda: man.channel.failed == 1)
    assert man.error == "alerts: inbox: HTTP status 500"
    man.offer([HURT], 1000.0 + FIRST - 1)
    until(lambda: there.taken.qsize() == 1)
    man.offer([HURT], 1000.0 + FIRST + 1)
    until(lambda: man.channel.failed == 2)
    man.offer([HURT], 1000.0 + 2 * FIRST + 2)
    until(lambda: there.taken.qsize() == 2)
    there.failure = ""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        man.offer([HURT], 1000.0 + 4 * FIRST)
    assert "thread" in man.error
    man.offer([HURT], 1000.0 + 4 * FIRST)
    until(lambda: man.channel.delivered == 1)
    assert man.error == ""


def test_a_restart_repeats_nothing_and_still_says_what_is_over(there: Inbox, cache: Path) -> None:
    told_once(there)
    there.next()
    second = postman(there)
    second.offer([HURT], 1030.0)
    second.offer([], 1060.0)
    second.offer([], 1060.0 + HOLD)
    assert there.next()["alarms"][0]["status"] == "resolved"
    until(lambda: second.channel.delivered == 1)
    [path] = cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [b"{", b"[1]", b'{"\xff":{}}', b"[" * 100_000, b'{"x": {"alarm": {}}}']
)
def test_without_its_file_or_with_another_stores_it_tells_once_more(
    there: Inbox, cache: Path, damage: bytes
) -> None:
    told_once(there)
    [path] = cache.iterdir()
    postman(there, "/another").offer([HURT], 1000.0)
    there.next()
    assert there.next()["store"] == "/another"
    path.write_bytes(damage)
    postman(there).offer([HURT], 1010.0)
    assert there.next()["alarms"][0]["status"] == "raised"


def test_an_alarm_of_another_version_is_forgotten(there: Inbox, cache: Path) -> None:
    told_once(there)
    [path] = cache.iterdir()
    path.write_text(path.read_text().replace('"code":"damaged"', '"code":"unknown"'))
    postman(there).offer([], 5000.0)
    assert faults == []


def test_a_cache_that_cannot_be_written_or_is_nowhere_is_no_failure(
    there: Inbox, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(_: str) -> Path:
        raise RuntimeError("no home")

    cache.write_text("no directory")
    told_once(there)
    monkeypatch.setattr(alert_channels, "cache_path", nowhere)
    told_once(there)


def test_a_store_that_is_away_ends_no_alarm(there: Inbox) -> None:
    man = told_once(there)
    there.next()
    man.offer([*man.active(), AWAY], 1000.0 + PAUSE)
    until(lambda: man.channel.delivered == 2)
    assert [a["code"] for a in there.next()["alarms"]] == ["store-away"]
    man.offer([*man.active(), AWAY], 1030.0 + 10 * HOLD)
    assert there.taken.empty()
    man.offer([HURT], 3000.0)
    man.offer([HURT], 3000.0 + HOLD)
    [over] = there.next()["alarms"]
    assert (over["code"], over["status"]) == ("store-away", "resolved")


def test_alarms_that_come_one_by_one_are_no_flood_of_messages(there: Inbox) -> None:
    man = told_once(there)
    there.next()
    alarms = [replace(HURT, subject=f"run/checkpoint-{n}") for n in range(1, 12)]
    for n in range(2, 12):
        man.offer(alarms[:n], 1000.0 + n)
    assert there.taken.empty()
    man.offer(alarms, 1000.0 + PAUSE)
    assert [a["subject"] for a in there.next()["alarms"]] == [a.subject for a in alarms[1:]]
    until(lambda: man.channel.delivered == 2)
    man.offer([*alarms, replace(HURT, subject="late")], 0.0)
    subjects = [a["subject"] for a in there.next()["alarms"]]
    assert "late" in subjects, "a clock that was set back delays no alarm"


DOCUMENT = {
    "format": 1,
    "severity": "critical",
    "title": "ckptsync: 1 raised",
    "text": "ckptsync: 1 raised\nCRITICAL damaged: <b>m</b> & *x*",
    "alarms": [],
}


def program(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(text)
    return (sys.executable, str(path))


def test_apprise_is_given_a_title_a_text_and_a_type(web: Hook) -> None:
    AppriseUrl(web.json_url("services/T0/secret?-key=1"), 1).deliver(DOCUMENT)
    path, _, body = web.taken.get_nowait()
    assert path == "/services/T0/secret?key=1"
    assert (body["title"], body["type"]) == (DOCUMENT["title"], "failure")
    assert body["message"] == "CRITICAL damaged: <b>m</b> & *x*"


@pytest.mark.parametrize("status", [500, 302])
def test_whatever_is_no_success_is_a_failure_and_says_no_secret(web: Hook, status: int) -> None:
    web.answer = status
    with pytest.raises(StoreError, match=rf"^HTTP status {status}$") as caught:
        AppriseUrl(web.json_url("secret"), 2).deliver(DOCUMENT)
    assert "secret" not in f"{caught.value}{caught.value.hint}{caught.value.__cause__}"
    assert "json-2 in alerts.urls" in caught.value.hint
    assert web.taken.qsize() == 1, "a redirection is not followed"


def test_a_service_that_is_not_there_is_given_up_without_the_secret() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"json://127.0.0.1:{taken.getsockname()[1]}/secret"
        with pytest.raises(StoreError, match=r"^no connection, or no answer in time$"):
            AppriseUrl(url, 1).deliver(DOCUMENT)


def test_a_delivery_that_takes_too_long_is_killed(
    web: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_channels, "RUNS_WITHIN", 1.0)
    web.gate.clear()
    with pytest.raises(StoreError, match=r"took longer than 1 s and was killed") as caught:
        AppriseUrl(web.json_url("secret"), 1).deliver(DOCUMENT)
    assert "secret" not in str(caught.value)


def test_a_delivery_has_few_variables_and_no_url_on_its_command_line(
    web: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    web.gate.clear()
    thread = threading.Thread(
        target=AppriseUrl(web.json_url("secret"), 1).deliver, args=(DOCUMENT,)
    )
    thread.start()
    web.next()
    processes = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # another user's, or ended
            command = (folder / "cmdline").read_bytes()
            status = (folder / "status").read_text()
            if b"apprise_delivery" in command and f"PPid:\t{os.getpid()}\n" in status:
                processes.append(command + (folder / "environ").read_bytes())
    web.gate.set()
    thread.join(60)
    [process] = processes
    assert b"secret" not in process
    assert b"planted" not in process


ALERTS = "roles: [head]\nstore: {url: /store}\nalerts: "


def test_urls_that_apprise_does_not_take_are_refused_at_the_start_and_not_repeated() -> None:
    urls = "[json://127.0.0.1/x, jsno://hunter2, slack://hunter2]"
    config = read(f"{ALERTS}{{urls: {urls}}}\n", "c", {})
    with pytest.raises(ConfigError, match=r"number 2: .*number 3: not an Apprise URL") as caught:
        open_channels(config, "boss", faults.append)
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"
    assert "number 1" not in str(caught.value)


def test_without_apprise_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_channels, "find_spec", lambda _name: None)
    config = read(f"{ALERTS}{{urls: [json://h/x]}}\n", "c", {})
    with pytest.raises(ConfigError, match="apprise is not installed") as caught:
        open_channels(config, "boss", faults.append)
    assert caught.value.hint == install_extra("alerts")


def test_each_url_is_a_channel_with_a_memory_of_its_own(web: Hook, cache: Path) -> None:
    with hook(500) as other:
        urls = f"['{web.json_url('secret')}', '{other.json_url('secret')}']"
        first, second = open_channels(
            read(f"{ALERTS}{{urls: {urls}, repeat: 2h}}\n", "c", {}), "boss", faults.append
        )
        for sender in (first, second):
            sender.offer([HURT], 1000.0)
        until(lambda: first.channel.delivered == 1)
        until(lambda: second.channel.failed == 1)
        assert (first.channel.channel, second.channel.channel) == ("json-1", "json-2")
        assert (first.error, second.error) == ("", "alerts: json-2: HTTP status 500")
        assert (len(first.active()), len(second.active())) == (1, 0)
        assert len([*cache.iterdir()]) == 1
        assert "secret" not in "".join(path.read_text() for path in cache.iterdir())
        for now, count in ((1000.0 + 7199, 1), (1000.0 + 7200, 2)):
            first.offer([HURT], now)
            until(lambda count=count: first.channel.delivered == count)  # type: ignore[misc]


def test_alert_test_says_of_each_channel_whether_it_arrived(
    web: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "head.yaml"
    url = web.json_url("secret")
    path.write_text(f"node: boss\n{ALERTS}{{urls: ['{url}'], command: [/bin/false]}}\n")
    assert main(["alert", "test", "-c", str(path)]) == 4
    out = capsys.readouterr().out
    assert "json-1: delivered" in out
    assert "command: failed: /bin/false: exit status 1" in out
    assert web.next()["message"].startswith("Sent by `ckptsync alert test` on boss")
    path.write_text(f"{ALERTS}{{command: [/bin/true]}}\n")
    assert main(["alert", "test", "-c", str(path), "--json"]) == 0
    channels = json.loads(capsys.readouterr().out)["channels"]
    assert channels == [{"channel": "command", "error": None}]
    path.write_text(f"{ALERTS}\n")
    assert main(["alert", "test", "-c", str(path)]) == 2


def test_a_command_reads_the_document_and_has_few_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    text = (
        "import json, os, sys; json.dump([json.load(sys.stdin), sorted(os.environ), os.getcwd(),"
        " sys.argv[1:]], open(sys.argv[1], 'w'))"
    )
    Command((*program(tmp_path / "p.py", text), str(tmp_path / "out"), "$HOME;")).deliver(DOCUMENT)
    document, names, folder, words = json.loads((tmp_path / "out").read_text())
    assert (document, folder, words[1]) == (DOCUMENT, "/", "$HOME;")
    assert "PATH" in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


def test_a_command_that_fails_is_not_there_or_takes_too_long_says_so_and_one_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Command(program(tmp_path / "p.py", "pass")).deliver({**DOCUMENT, "text": "x" * 10**6})
    with pytest.raises(StoreError, match="exit status 3"):
        Command(program(tmp_path / "p.py", "raise SystemExit(3)")).deliver(DOCUMENT)
    with pytest.raises(StoreError, match="No such file"):
        Command((str(tmp_path / "gone"),)).deliver(DOCUMENT)
    pid = tmp_path / "pid"
    for seconds in (1.0, 10.0, 60.0):  # a busy machine may need some to start it
        monkeypatch.setattr(alert_channels, "RUNS_WITHIN", seconds)
        with pytest.raises(StoreError, match="was killed"):
            Command(("/bin/sh", "-c", f"sleep 600 & echo $! > '{pid}'; wait")).deliver(DOCUMENT)
        if pid.exists() and pid.read_text():
            break
    assert waiting.until(lambda: not is_alive(int(pid.read_text()))), "with all that it started"
