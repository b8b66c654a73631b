"""The heartbeat as a tick."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckptsync.daemon.heart import MOST, Heart
from ckptsync.daemon.identity import heartbeat
from ckptsync.daemon.stopping import Stopping
from ckptsync.fleet.heartbeat import read, write
from ckptsync.stores.contract import Store
from ckptsync.stores.posix.store import PosixStore

MINE = heartbeat("n0", ("worker",))


@dataclass
class Busy:
    on_the_way: tuple[str, ...] = ()

    def queue(self) -> tuple[str, ...]:
        return self.on_the_way

    def errors(self) -> tuple[str, ...]:
        return ("worker: away",)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return PosixStore(str(tmp_path))


@pytest.fixture
def stop() -> Iterator[Stopping]:
    stop = Stopping()
    yield stop
    stop.close()


def test_each_beat_tells_what_is_on_the_way_now(store: Store, stop: Stopping) -> None:
    busy = Busy(("a/checkpoint-1",))
    heart = Heart(store, MINE, busy, stop)
    heart.beat()
    busy.on_the_way = tuple(f"a/checkpoint-{n}" for n in range(MOST + 1))
    heart.beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.beat, len(seen.queue), seen.errors) == (2, MOST, ("worker: away",))
    assert seen.told > 0


def test_the_second_of_two_asks_for_a_stop_with_2_and_leaves_the_firsts_word(store: Store, stop: Stopping) -> None:
    first = replace(MINE, instance="first", started=1.0)
    write(store, first)
    heart = Heart(store, MINE, Busy(), stop)
    heart.beat()
    heart.farewell()
    assert (stop.asked, stop.code, read(store, "n0", ("worker",))) == (True, 2, first)


def test_the_first_of_two_goes_on(store: Store, stop: Stopping) -> None:
    write(store, replace(MINE, instance="second", started=MINE.started + 1))
    Heart(store, MINE, Busy(), stop).beat()
    assert not stop.asked


def test_a_farewell_says_stopped_and_nothing_on_the_way(store: Store, stop: Stopping) -> None:
    heart = Heart(store, MINE, Busy(("a/checkpoint-1",)), stop)
    heart.beat()
    heart.farewell()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.stopped, seen.queue) == (True, ())
