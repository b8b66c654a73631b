"""One look at a whole store."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptsync.catalogue.reading import Cache, read
from ckptsync.config.loading import read as read_config
from ckptsync.fleet.alarms import Patience
from ckptsync.fleet.heartbeat import beat
from ckptsync.service.overview import Overseer, patience, room
from ckptsync.service.process import heartbeat
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_store
from tests.cli_store import make


def test_it_sees_what_came_since_the_last_look(tmp_path: Path) -> None:
    store = open_store(str(make(tmp_path / "store")))
    overseer = Overseer(store, partial(read, store, Cache()), Patience())
    first = overseer.look()
    assert (first.checkpoints, first.nodes) == ({"ARRIVING": 1, "VERIFIED": 1}, ())
    assert abs(first.at - time.time()) < 60
    assert first.room
    beat(store, heartbeat("n0", ("worker",)))
    assert [n.state for n in overseer.look().nodes] == ["alive"]


def test_a_store_elsewhere_has_no_room_and_a_clock_of_its_own() -> None:
    store = MemoryStore("s3://bucket")
    beat(store, replace(heartbeat("n0", ("worker",)), told=time.time()))
    seen = Overseer(store, partial(read, store, Cache()), Patience()).look()
    assert seen.room is None
    assert [round(n.age) for n in seen.nodes] == [0], "by this machine's own heart"


def test_a_configuration_says_what_is_too_long() -> None:
    text = "roles: [head]\nstore: {url: /s}\nhead: {patience_node: 3m}\nverify: {period: 2d}\n"
    found = patience(read_config(text, "c", {}))
    assert (found.node, found.period) == (180.0, 172800.0)


def test_the_room_of_a_store_is_known_where_it_is_a_path(tmp_path: Path) -> None:
    there = room(f"file://{tmp_path}")
    assert there
    assert 0 < there.free < there.total
    assert room(str(tmp_path / "gone")) is None
    assert room("s3://bucket/prefix") is None
