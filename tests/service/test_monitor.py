"""The overview of a store, and the alarms that the head's monitor sends."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.config.loading import read as read_config
from ckptsync.errors import StoreError, Transient
from ckptsync.service import monitor as module
from ckptsync.service.alert_channels import open_channels
from ckptsync.service.log import changed
from ckptsync.service.monitor import AWAY, Monitor, OverviewReader, patience, room
from ckptsync.service.process_control import heartbeat
from ckptsync.status.alarms import Alarm, Patience
from ckptsync.status.heartbeat import beat
from ckptsync.status.overview import Overview
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_store
from tests.support.small_store import make
from tests.support.status_examples import heart, shown, waiting
from tests.support.webhook_server import hook

HURT = Alarm("damaged", "run/checkpoint-1", "critical", 5.0, "1 h ago", "repair it")


class Given(OverviewReader):
    """Sees what it is given, in turn."""

    def __init__(self, *seen: Overview | StoreError) -> None:
        self._seen = list(seen)

    def read(self) -> Overview:
        found = self._seen.pop(0)
        if isinstance(found, StoreError):
            raise found
        return found


def alarmed(*alarms: Alarm) -> Overview:
    return replace(shown(heart()), alarms=alarms)


class Recorder:
    """A sender that has sent `HURT`, and records what it is offered."""

    error = ""

    def __init__(self) -> None:
        self.offers: list[list[Alarm]] = []

    def active(self) -> list[Alarm]:
        return [HURT]

    def offer(self, alarms: Iterable[Alarm], now: float) -> None:
        self.offers.append([*alarms])


def test_an_alarm_is_logged_once_with_what_it_says_and_once_when_it_is_over() -> None:
    seen = [alarmed(HURT), alarmed(replace(HURT, text="2 h ago")), alarmed(), alarmed()]
    monitor, said, before = Monitor(Given(*seen)), [], dict[str, str]()
    for _ in seen:
        lines, before = changed(before, monitor.check().lines)
        said.append([line.text for line in lines])
    subject = "code=damaged subject=run/checkpoint-1"
    holds = f'phase=alarm {subject} severity=critical detail="1 h ago" todo="repair it"'
    assert said == [[holds], [], [f"phase=alarm-over {subject}"], []]


def test_a_store_that_stays_away_is_told_after_a_while_and_the_last_picture_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, away, well = [0.0], Transient("store: 503"), alarmed(HURT)
    clock = SimpleNamespace(time=lambda: 1e9 + now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(module, "time", clock)
    sender = Recorder()
    watch = Monitor(Given(well, away, well, away, away), [sender])  # type: ignore[list-item]
    for now[0] in (0, AWAY - 1, AWAY, 2 * AWAY - 1, 2 * AWAY):
        with suppress(Transient):
            watch.check()
    assert sender.offers[:-1] == [[HURT], [HURT]]
    sent, alarm = sender.offers[-1]
    assert (sent, alarm.key, alarm.severity) == (HURT, "store-away store", "critical")
    assert (alarm.text.endswith(": store: 503"), alarm.since) == (True, 1e9 + AWAY)
    assert watch.overview is well


def test_a_configuration_names_the_channels_the_kinds_and_how_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    store = MemoryStore()
    work = waiting("run/checkpoint-1", since=time.time() - 1e6)
    beat(store, replace(heartbeat("n0", ("worker",)), written=time.time(), running=work))
    overviews = OverviewReader(store, lambda: shown().catalogue, Patience())
    with hook() as there:
        url = there.json_url("secret")
        alerts = f"alerts: {{urls: ['{url}'], command: [/bin/true], on: [damage]}}\n"
        config = read_config(f"roles: [head]\nstore: {{url: /s}}\n{alerts}", "c", {})
        deaf = Monitor(overviews, open_channels(config, "boss", print))
        assert [s.channel.channel for s in deaf.senders] == ["json-1", "command"]
        deaf.check()
        assert deaf.overview
        assert "waiting n0" in {a.key for a in deaf.overview.alarms}
        assert there.taken.empty(), "nobody asked for what is late"
        text = f"roles: [head]\nstore: {{url: /s}}\n{alerts.replace('damage', 'late')}"
        late = read_config(text, "c", {})
        Monitor(overviews, open_channels(late, "boss", print)).check()
        assert "WARNING waiting: n0" in there.next()["message"]


def test_it_sees_what_came_since_the_last_look(tmp_path: Path) -> None:
    store = open_store(str(make(tmp_path / "store")))
    overviews = OverviewReader(store, partial(read_catalogue, store, Cache()), Patience())
    first = overviews.read()
    assert (first.checkpoints, first.nodes) == ({"INCOMPLETE": 1, "VERIFIED": 1}, ())
    assert abs(first.at - time.time()) < 60
    assert first.room
    ahead = time.time() + 86400.0
    record = next(path for path in tmp_path.glob("store/fsdp2/.ckptsync/**/*") if path.is_file())
    os.utime(record, (ahead, ahead))
    assert overviews.read().at == pytest.approx(ahead), "no head: by the newest record"
    beat(store, heartbeat("n0", ("worker",)))
    assert [n.state for n in overviews.read().nodes] == ["alive"]


def test_a_store_elsewhere_has_no_room_and_a_clock_of_its_own() -> None:
    store = MemoryStore("s3://bucket")
    beat(store, replace(heartbeat("n0", ("worker",)), written=time.time()))
    seen = OverviewReader(store, partial(read_catalogue, store, Cache()), Patience()).read()
    assert seen.room is None
    assert [n.age < 60 for n in seen.nodes] == [True], "by this machine's own heart"


def test_a_configuration_says_what_is_too_long() -> None:
    text = "roles: [head]\nstore: {url: /s}\nhead: {patience_node: 3m}\nverify: {period: 2d}\n"
    config = read_config(text, "c", {})
    found = patience(config)
    assert (found.node, found.period) == (180.0, 172800.0)
    assert open_channels(config, "boss", print) == (), "without alerts nobody is told"


def test_the_room_of_a_store_is_known_where_it_is_a_path(tmp_path: Path) -> None:
    there = room(f"file://{tmp_path}")
    assert there
    assert 0 < there.free < there.total
    assert room(str(tmp_path / "gone")) is None
    assert room("s3://bucket/prefix") is None
