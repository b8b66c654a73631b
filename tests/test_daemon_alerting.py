"""What is told, tried again, and remembered: over real HTTP."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.daemon.alerting import FIRST, From, Postman, kept_in
from ckptsync.daemon.channels import Webhook
from ckptsync.fleet.alarms import KINDS, Alarm
from ckptsync.fleet.alerting import HOLD, Terms
from tests.webhooks import Hook, hook

HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "bytes differ", "repair it")
AWAY = Alarm("store-away", "store", "critical", 5.0, "no answer", "look")
faults: list[BaseException] = []


def postman(there: Hook, kept: Path | None = None, store: str = "/store") -> Postman:
    return Postman(Webhook(f"{there.url}/secret"), Terms(KINDS, 3600.0), From(store, "boss"), kept, faults.append)


def until(is_so: Callable[[], object]) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("alert-"):
            thread.join(20)
    assert is_so()


def test_it_tells_once_and_says_when_it_is_over() -> None:
    with hook() as there:
        man = postman(there)
        man.offer([HURT], 1000.0)
        told = there.next()
        assert (told["store"], told["head"], told["alarms"][0]["status"], told["alarms"][0]["key"]) == (
            "/store",
            "boss",
            "raised",
            "damaged run/checkpoint-1",
        )
        until(lambda: man.posted.delivered == 1)
        man.offer([HURT], 1030.0)
        man.offer([], 1060.0)
        man.offer([], 1060.0 + HOLD)
        assert there.next()["text"] == "ckptsync: 1 resolved (/store)\nOVER damaged: run/checkpoint-1"


def test_a_webhook_that_hangs_holds_nobody_up_and_what_came_meanwhile_follows() -> None:
    with hook() as there:
        there.gate.clear()
        man = postman(there)
        man.offer([HURT], 1000.0)
        there.next()
        for now in (1030.0, 1060.0):
            man.offer([HURT, replace(HURT, subject="other")], now)
        assert there.taken.empty()
        there.gate.set()
        until(lambda: man.posted.delivered == 1)
        man.offer([HURT, replace(HURT, subject="other")], 1090.0)
        assert [a["subject"] for a in there.next()["alarms"]] == ["other"]


def test_what_failed_is_seen_and_tried_again_later_and_less_and_less_often() -> None:
    with hook(500) as there:
        man = postman(there)
        man.offer([HURT], 1000.0)
        until(lambda: man.posted.failed == 1)
        assert man.error == "alerts: webhook http://127.0.0.1: answered 500"
        man.offer([HURT], 1000.0 + FIRST - 1)
        until(lambda: there.taken.qsize() == 1)
        man.offer([HURT], 1000.0 + FIRST + 1)
        until(lambda: man.posted.failed == 2)
        man.offer([HURT], 1000.0 + 2 * FIRST + 2)
        until(lambda: there.taken.qsize() == 2)
        there.answer = 200
        man.offer([HURT], 1000.0 + 4 * FIRST)
        until(lambda: man.posted.delivered == 1)
        assert man.error == ""


def test_a_restart_repeats_nothing_and_still_says_what_is_over(tmp_path: Path) -> None:
    with hook() as there:
        first = postman(there, tmp_path / "cache")
        first.offer([HURT], 1000.0)
        until(lambda: first.posted.delivered == 1)
        there.next()
        second = postman(there, tmp_path / "cache")
        second.offer([HURT], 1030.0)
        second.offer([], 1060.0)
        second.offer([], 1060.0 + HOLD)
        assert there.next()["alarms"][0]["status"] == "resolved"
        until(lambda: second.posted.delivered == 1)
        [path] = (tmp_path / "cache").iterdir()
        assert "secret" not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"{", b"[1]", b'{"\xff":{}}', b"[" * 100_000, b'{"x": {"alarm": {}}}'])
def test_without_its_file_or_with_another_stores_it_tells_once_more(tmp_path: Path, damage: bytes) -> None:
    with hook() as there:
        man = postman(there, tmp_path)
        man.offer([HURT], 1000.0)
        until(lambda: man.posted.delivered == 1)
        [path] = tmp_path.iterdir()
        postman(there, tmp_path, "/another").offer([HURT], 1000.0)
        there.next()
        assert there.next()["store"] == "/another"
        path.write_bytes(damage)
        postman(there, tmp_path).offer([HURT], 1010.0)
        assert there.next()["alarms"][0]["status"] == "raised"


def test_an_alarm_of_another_version_is_forgotten(tmp_path: Path) -> None:
    with hook() as there:
        man = postman(there, tmp_path)
        man.offer([HURT], 1000.0)
        until(lambda: man.posted.delivered == 1)
        [path] = tmp_path.iterdir()
        path.write_text(path.read_text().replace('"code":"damaged"', '"code":"unknown"'))
        postman(there, tmp_path).offer([], 5000.0)
        assert faults == []


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with hook() as there:
        man = postman(there, tmp_path / "file" / "below")
        man.offer([HURT], 1000.0)
        until(lambda: man.posted.delivered == 1)


def test_a_store_that_is_away_ends_no_alarm() -> None:
    with hook() as there:
        man = postman(there)
        man.offer([HURT], 1000.0)
        until(lambda: man.posted.delivered == 1)
        there.next()
        man.more(AWAY, 1030.0)
        until(lambda: man.posted.delivered == 2)
        assert [a["code"] for a in there.next()["alarms"]] == ["store-away"]
        man.more(AWAY, 1030.0 + 10 * HOLD)
        assert there.taken.empty()
        man.offer([HURT], 3000.0)
        man.offer([HURT], 3000.0 + HOLD)
        assert [(a["code"], a["status"]) for a in there.next()["alarms"]] == [("store-away", "resolved")]


def test_what_may_be_lost_lies_in_the_services_directory_or_the_users() -> None:
    assert kept_in({"CACHE_DIRECTORY": "/var/cache/ckptsync:/x", "HOME": "/h"}) == Path("/var/cache/ckptsync")
    assert kept_in({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/ckptsync")
    assert kept_in({"HOME": "/h"}) == Path("/h/.cache/ckptsync")
    assert kept_in({}) is None
