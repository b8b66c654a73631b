"""The heartbeat as a tick."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.daemon.clocks import Clocks
from ckptsync.daemon.heart import MOST, Gauges, Heart
from ckptsync.daemon.identity import heartbeat
from ckptsync.daemon.stoppable import Stoppable
from ckptsync.daemon.stopping import Stopping
from ckptsync.daemon.working import Ground, Outcome, Role, Working
from ckptsync.errors import StoreError
from ckptsync.fleet import facts
from ckptsync.fleet.heartbeat import Disk, Heartbeat, listed, read, write
from ckptsync.stores.contract import Entry
from ckptsync.stores.posix.store import PosixStore

MINE = heartbeat("n0", ("worker",))


LACKS = {"a/.ckptsync/checkpoint-1/report-1-0123456789abcdef.json": ("checkpoint-1/model",)}


def busy(*queue: str) -> Working:
    """A worker that says so, and one whose store is away."""
    outcome = Outcome(queue=queue, notes=("spool full",), watch={"/data/out": "events"}, oldest=time.monotonic() - 60, lacks=LACKS)
    role = Role("worker", 1, lambda: outcome, print)
    role.tick()
    role.tick.error = "away"
    return Working([role], ground=Ground(dict, lambda: (Disk("/data/out", 1, 2, 3),)))


@pytest.fixture
def store(tmp_path: Path) -> Stoppable:
    return Stoppable(PosixStore(str(tmp_path)), lambda: False)


@pytest.fixture
def stop() -> Iterator[Stopping]:
    stop = Stopping()
    yield stop
    stop.close()


def test_a_name_that_is_no_text_silences_no_heart(store: Stoppable, stop: Stopping) -> None:
    odd = os.fsdecode(b"/data/out/r\xe9sum\xe9")
    working = busy("a/checkpoint-1")
    working.loops[0].error = f"{odd}: away"
    Heart(store, MINE, working, stop, Gauges(Clocks(), lambda: 0)).beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert seen.errors == ("worker: /data/out/r\ufffdsum\ufffd: away",)


def test_each_beat_tells_what_is_on_the_way_now(store: Stoppable, stop: Stopping) -> None:
    heart = Heart(store, MINE, busy(*(f"a/checkpoint-{n}" for n in range(MOST + 1))), stop, Gauges(Clocks(), lambda: store.handed))
    heart.beat()
    heart.beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.beat, len(seen.queue), seen.errors) == (2, MOST, ("worker: away",))
    assert seen.told > 0


def test_a_beat_tells_how_long_it_waits_how_fast_it_is_and_how_full_the_disks_are(store: Stoppable, stop: Stopping) -> None:
    heart = Heart(store, MINE, busy("a/checkpoint-1"), stop, Gauges(Clocks(), lambda: store.handed))
    heart.beat()
    store.write("a/checkpoint-1/model", [bytes(1000)])
    heart.beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert 60 <= seen.oldest < 90
    assert seen.sent_bytes > 1000
    assert seen.rate > 0
    assert seen.lacks == LACKS
    assert (seen.disk, seen.watch, seen.notes) == ((Disk("/data/out", 1, 2, 3),), {"/data/out": "events"}, ("spool full",))


def test_what_a_node_is_made_of_is_told_once_and_again_when_it_has_changed(
    store: Stoppable, stop: Stopping, tmp_path: Path
) -> None:
    runs: dict[str, Path] = {}
    heart = Heart(store, MINE, Working(ground=Ground(lambda: runs, tuple)), stop, Gauges(Clocks(), lambda: 0))
    heart.beat()
    [first] = facts.listed(store)
    heart.beat()
    assert list(facts.listed(store)) == [first]
    runs["run"] = tmp_path
    heart.beat()
    [second] = facts.listed(store)
    assert isinstance(second, facts.Facts)
    assert list(second.file_systems) == [str(tmp_path)]
    assert [h.node for _, h in listed(store) if isinstance(h, Heartbeat)] == ["n0"], "facts are no heartbeat"


def test_the_second_of_two_asks_for_a_stop_with_2_and_leaves_the_firsts_word(store: Stoppable, stop: Stopping) -> None:
    first = replace(MINE, instance="first", started=1.0)
    write(store, first)
    heart = Heart(store, MINE, busy(), stop, Gauges(Clocks(), lambda: store.handed))
    heart.beat()
    heart.farewell()
    assert (stop.asked, stop.code, read(store, "n0", ("worker",))) == (True, 2, first)


def test_the_first_of_two_goes_on(store: Stoppable, stop: Stopping) -> None:
    write(store, replace(MINE, instance="second", started=MINE.started + 1))
    Heart(store, MINE, busy(), stop, Gauges(Clocks(), lambda: store.handed)).beat()
    assert not stop.asked


def test_a_farewell_says_stopped_and_nothing_on_the_way(store: Stoppable, stop: Stopping) -> None:
    heart = Heart(store, MINE, busy("a/checkpoint-1"), stop, Gauges(Clocks(), lambda: store.handed))
    heart.beat()
    heart.farewell()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.stopped, seen.queue) == (True, ())


class Early(PosixStore):
    """A store whose clock is a minute behind this node's."""

    def names(self, prefix: str) -> Iterator[Entry]:
        return (replace(e, mtime=e.mtime - 60) for e in super().names(prefix))


def test_the_facts_say_how_far_the_node_s_clock_is_from_the_store_s(tmp_path: Path, stop: Stopping) -> None:
    for kind, expected in ((PosixStore, 0), (Early, 60e9)):
        (tmp_path / kind.__name__).mkdir()
        store = kind(str(tmp_path / kind.__name__))
        Heart(store, MINE, Working(), stop, Gauges(Clocks(), lambda: 0)).beat()
        [told] = facts.listed(store)
        assert isinstance(told, facts.Facts)
        assert told.clock_offset == pytest.approx(expected, abs=1e8)


def test_what_cannot_be_measured_is_not_told_and_keeps_back_no_other_fact(tmp_path: Path, stop: Stopping) -> None:
    class Unmeasured(PosixStore):
        def names(self, prefix: str) -> Iterator[Entry]:
            if "clocks" in prefix:
                raise StoreError(f"{prefix}: not allowed")
            return super().names(prefix)

    store = Unmeasured(str(tmp_path))
    Heart(store, MINE, Working(), stop, Gauges(Clocks(), lambda: 0)).beat()
    [told] = facts.listed(store)
    assert isinstance(told, facts.Facts)
    assert (told.clock_offset, bool(told.kernel)) == (None, True)
