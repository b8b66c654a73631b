"""The head's look at everything."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.config.loading import read
from ckptsync.errors import StoreError, Transient
from ckptsync.fleet.alarms import KINDS, Alarm, Patience
from ckptsync.fleet.alerting import Terms
from ckptsync.fleet.heartbeat import beat
from ckptsync.fleet.overview import Overview
from ckptsync.service import alerts as module
from ckptsync.service.alerts import Monitor, Sender, Webhook, monitor
from ckptsync.service.overview import Overseer
from ckptsync.service.process import heartbeat
from ckptsync.stores.memory import MemoryStore
from tests.scenes import heart, shown
from tests.webhooks import Hook, hook

HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "1 h ago", "repair it")


class Given(Overseer):
    """Sees what it is given, in turn."""

    def __init__(self, *seen: Overview | StoreError) -> None:
        self._seen = list(seen)

    def look(self) -> Overview:
        found = self._seen.pop(0)
        if isinstance(found, StoreError):
            raise found
        return found


def alarmed(*alarms: Alarm) -> Overview:
    return replace(shown(heart()), alarms=alarms)


def postman(there: Hook) -> Sender:
    return Sender(Webhook(there.url), Terms(KINDS, 3600.0), ("/store", "boss"), None, print)


def said(looks: Sequence[Any], look: Callable[[], Any]) -> list[list[str]]:
    return [[line.text for line in look().lines] for _ in looks]


def test_an_alarm_is_logged_while_it_holds_and_once_when_it_is_over() -> None:
    seen = [alarmed(HURT), alarmed(replace(HURT, text="2 h ago")), alarmed(), alarmed()]
    first, second, third, fourth = said(seen, Monitor(Given(*seen)).look)
    assert first == second == ['phase=alarm code=damaged subject=run/checkpoint-1 severity=critical todo="repair it"']
    assert (third, fourth) == (["phase=alarm-over code=damaged subject=run/checkpoint-1"], [])


def test_alerts_go_out_and_a_channel_that_fails_is_an_error_of_the_tick() -> None:
    with hook(500) as there:
        look = Monitor(Given(alarmed(HURT), alarmed(HURT)), [postman(there)])
        look.look()
        assert there.next()["alarms"][0]["code"] == "damaged"
        until = time.monotonic() + 10
        while not look.senders[0].told.failed and time.monotonic() < until:
            time.sleep(0.01)
        assert look.look().errors == ("alerts: webhook http://127.0.0.1: answered 500",)


def test_a_store_that_stays_away_is_told_after_a_while_and_the_last_picture_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with hook() as there:
        away = Transient("store: 503")
        look = Monitor(Given(alarmed(), away, away), [postman(there)])
        look.look()
        with pytest.raises(Transient):
            look.look()
        for thread in threading.enumerate():
            if thread.name.startswith("alert-"):
                thread.join(20)
        assert there.taken.empty()
        monkeypatch.setattr(module, "AWAY", 0.0)
        with pytest.raises(Transient):
            look.look()
        [told] = there.next()["alarms"]
        assert (told["code"], told["severity"], told["text"].endswith(": store: 503")) == ("store-away", "critical", True)
        assert look.seen is not None


def test_a_configuration_names_the_channels_the_kinds_and_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    store = MemoryStore()
    beat(store, replace(heartbeat("n0", ("worker",)), told=time.time(), queue=("run/checkpoint-1",), oldest=1e6))
    overseer = Overseer(store, lambda: shown().catalogue, Patience())
    with hook() as there:
        alerts = f"alerts: {{webhook: {there.url}/secret, command: [/bin/true], on: [damage]}}\n"
        config = read(f"roles: [head]\nstore: {{url: /s}}\n{alerts}", "c", {})
        deaf = monitor(config, "boss", overseer, print)
        assert [s.told.channel for s in deaf.senders] == ["webhook", "command"]
        deaf.look()
        assert deaf.seen
        assert "waiting n0" in {a.key for a in deaf.seen.alarms}
        assert there.taken.empty(), "nobody asked for what is late"
        late = read(f"roles: [head]\nstore: {{url: /s}}\n{alerts.replace('damage', 'late')}", "c", {})
        monitor(late, "boss", overseer, print).look()
        assert there.next()["head"] == "boss"


def test_without_alerts_nobody_is_told() -> None:
    config = read("roles: [head]\nstore: {url: /s}\n", "c", {})
    assert monitor(config, "boss", Given(), print).senders == ()
