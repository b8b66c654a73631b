"""The heartbeat as a tick."""

import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.service.heartbeat_writer import MOST, Heart, Rate, disks, survey
from ckptsync.service.log import shown
from ckptsync.service.own_process import Stopping, heartbeat
from ckptsync.service.roles import Roles
from ckptsync.service.store_connection import ServiceStore
from ckptsync.service.tasks import Outcome, Task
from ckptsync.spool import markers
from ckptsync.spool.markers import Begun, begun_path, write_mark
from ckptsync.status.heartbeat import Facts, Heartbeat, read, write, write_facts
from ckptsync.status.nodes import read_nodes
from ckptsync.stores.contract import Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore

MINE = heartbeat("n0", ("worker",))


LACKS = {"a/.ckptsync/checkpoint-1/report-1-0123456789abcdef.json": ("checkpoint-1/model",)}


def busy(*queue: str) -> Roles:
    """A worker that says so, and one whose store is away."""
    outcome = Outcome(
        queue=queue,
        notes=("spool full",),
        watch={"/data/out": "events"},
        oldest=time.monotonic() - 60,
        lacks=LACKS,
    )
    role = Task("worker", 1, lambda: outcome, print)
    role()
    role.error = "away"
    return Roles([], [role])


def served(store: Store) -> ServiceStore:
    """The service's, once it has come."""
    found = ServiceStore(store.url, lambda: False)
    found.came(store)
    return found


class Serving:
    """A worker's output directories."""

    def __init__(self, **runs: Path) -> None:
        self.found = runs

    def runs(self) -> dict[str, Path]:
        return self.found

    def held(self) -> list[tuple[Path, int]]:
        return [(path, 3) for path in self.found.values()]


@pytest.fixture
def store(tmp_path: Path) -> ServiceStore:
    return served(PosixStore(str(tmp_path)))


@pytest.fixture
def stop() -> Stopping:
    return Stopping()


def test_a_name_that_is_no_text_silences_no_heart(store: ServiceStore, stop: Stopping) -> None:
    odd = os.fsdecode(b"/data/out/r\xe9sum\xe9")
    working = busy("a/checkpoint-1")
    working.tasks[0].error = f"{odd}: away"
    Heart(store, MINE, working, stop).beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert seen.errors == ("worker: /data/out/r\ufffdsum\ufffd: away",)


def test_each_beat_tells_what_is_on_the_way_now(store: ServiceStore, stop: Stopping) -> None:
    heart = Heart(store, MINE, busy(*(f"a/checkpoint-{n}" for n in range(MOST + 1))), stop)
    heart.beat()
    heart.beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.beat, len(seen.queue), seen.errors) == (2, MOST, ("worker: away",))
    assert seen.written > 0


def test_a_beat_tells_how_long_it_waits_how_fast_it_is_and_how_full_the_disks_are(
    store: ServiceStore, stop: Stopping, tmp_path: Path
) -> None:
    roles = busy("a/checkpoint-1")
    roles.worker, roles.sent_bytes = Serving(out=tmp_path), lambda: store.sent_bytes  # type: ignore[assignment]
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    store.write("a/checkpoint-1/model", [bytes(1000)])
    heart.beat()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert 60 <= seen.oldest < 90
    assert seen.sent_bytes > 1000
    assert seen.rate > 0
    assert seen.lacks == LACKS
    assert [(disk.path, disk.spool) for disk in seen.disk] == [(str(tmp_path), 3)]
    assert (seen.watch, seen.notes) == ({"/data/out": "events"}, ("spool full",))


def test_what_a_node_is_made_of_is_told_once_and_again_when_it_has_changed(
    store: ServiceStore, stop: Stopping, tmp_path: Path
) -> None:
    roles, serving = Roles(), Serving()
    roles.worker = serving  # type: ignore[assignment]
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    [first] = read_nodes(store).facts.values()
    heart.beat()
    assert list(read_nodes(store).facts.values()) == [first]
    serving.found["run"] = tmp_path
    heart.beat()
    [second] = read_nodes(store).facts.values()
    assert isinstance(second, Facts)
    assert list(second.file_systems) == [str(tmp_path)]
    assert [
        f.content.node for f in read_nodes(store).hearts if isinstance(f.content, Heartbeat)
    ] == ["n0"], "facts are no heartbeat"


def test_the_second_of_two_asks_for_a_stop_with_2_and_leaves_the_firsts_word(
    store: ServiceStore, stop: Stopping
) -> None:
    first = replace(MINE, instance="first", started=1.0)
    write(store, first)
    heart = Heart(store, MINE, busy(), stop)
    heart.beat()
    heart.farewell()
    assert (stop.is_stopping, stop.code, read(store, "n0", ("worker",))) == (True, 2, first)


def test_the_first_of_two_goes_on(store: ServiceStore, stop: Stopping) -> None:
    write(store, replace(MINE, instance="second", started=MINE.started + 1))
    Heart(store, MINE, busy(), stop).beat()
    assert not stop.is_stopping


def test_a_farewell_says_stopped_and_nothing_on_the_way(
    store: ServiceStore, stop: Stopping
) -> None:
    heart = Heart(store, MINE, busy("a/checkpoint-1"), stop)
    heart.beat()
    heart.farewell()
    seen = read(store, "n0", ("worker",))
    assert seen
    assert (seen.stopped, seen.queue) == (True, ())


class Early(PosixStore):
    """A store whose clock is a minute behind this node's."""

    def names(self, prefix: str) -> Iterator[Entry]:
        return (replace(e, mtime=e.mtime - 60) for e in super().names(prefix))


def test_the_facts_say_how_far_the_node_s_clock_is_from_the_store_s(
    tmp_path: Path, stop: Stopping
) -> None:
    for kind, expected in ((PosixStore, 0), (Early, 60e9)):
        (tmp_path / kind.__name__).mkdir()
        store = kind(str(tmp_path / kind.__name__))
        Heart(store, MINE, Roles(), stop).beat()
        [told] = read_nodes(store).facts.values()
        assert isinstance(told, Facts)
        assert told.clock_offset == pytest.approx(expected, abs=1e8)


def test_what_cannot_be_measured_is_not_told_and_keeps_back_no_other_fact(
    tmp_path: Path, stop: Stopping
) -> None:
    class Unmeasured(PosixStore):
        def names(self, prefix: str) -> Iterator[Entry]:
            if "clocks" in prefix:
                raise StoreError(f"{prefix}: not allowed")
            return super().names(prefix)

    store = Unmeasured(str(tmp_path))
    Heart(store, MINE, Roles(), stop).beat()
    [told] = read_nodes(store).facts.values()
    assert isinstance(told, Facts)
    assert (told.clock_offset, bool(told.kernel)) == (None, True)


def begin(out: Path, process: str, train: str, rank: int, at: float) -> None:
    told = {"torch": "2.13", "NCCL_SOCKET_IFNAME": "eth0"} if rank == 0 else {}
    mark = Begun(
        train,
        rank,
        4,
        2 if rank else 0,
        "host",
        1,
        "1",
        "boot",
        at,
        "transformers 5",
        told,
        process,
    )
    write_mark(begun_path(out / "_ckptsync", process), mark)


def test_a_node_tells_what_it_is_made_of(tmp_path: Path) -> None:
    found = survey("n0", {"run": tmp_path})
    assert (found.node, found.python, found.kernel) == (
        "n0",
        platform.python_version(),
        platform.release(),
    )
    assert found.limits["nofile"] > 0
    assert found.limits["max_user_watches"] > 0
    assert len(found.umask) == 4
    assert found.file_systems[str(tmp_path)]
    assert found.trains == {}
    assert survey("n0", {"run": tmp_path}) == found, "it changes only where something did"


def test_the_newest_training_of_each_run_is_told_as_its_hook_introduced_it(tmp_path: Path) -> None:
    begin(tmp_path, "a", "old", 0, 1.0)
    begin(tmp_path, "b", "new", 1, 5.0)
    begin(tmp_path, "c", "new", 0, 4.0)
    train = survey("n0", {"run": tmp_path, "other": tmp_path / "none"}).trains
    assert list(train) == ["run"]
    assert (train["run"].world, train["run"].local_world, train["run"].began) == (4, 2, 4.0)
    assert train["run"].facts["NCCL_SOCKET_IFNAME"] == "eth0"


def test_a_training_runs_until_its_processes_say_that_they_ended_or_are_gone(
    tmp_path: Path,
) -> None:
    mine = Begun(
        "t",
        0,
        2,
        2,
        socket.gethostname(),
        os.getpid(),
        markers.began(os.getpid()),
        markers.boot(),
        1.0,
        process="a",
    )
    other = replace(mine, rank=1, process="b")

    def state(*begun: Begun) -> str:
        for b in begun:
            write_mark(begun_path(tmp_path / "_ckptsync", b.process), b)
        return survey("n0", {"run": tmp_path}).trains["run"].state

    assert state(mine, other) == "runs"
    assert state(replace(mine, ended=2.0), other) == "runs"
    assert state(replace(mine, ended=2.0), replace(other, began="1")) == "gone"
    assert state(mine, replace(other, left=2.0)) == "runs"
    assert state(replace(mine, left=2.0), replace(other, left=2.0)) == "gone", (
        "an exception ended it"
    )
    assert state(replace(mine, ended=2.0), replace(other, ended=2.0, left=2.0)) == "ended"


def test_a_path_that_is_no_text_can_be_told(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    store = MemoryStore()
    write_facts(store, survey("n0", {"run": odd}), ("worker",))
    assert shown(odd).endswith("\ufffd")


def test_a_rate_is_over_the_last_minute() -> None:
    rate = Rate()
    assert rate.read(0, 0) == 0
    assert rate.read(30, 300) == 10
    assert rate.read(60, 300) == 5
    assert rate.read(90, 300) == 0
    assert rate.read(120, 6300) == 100


def test_a_rest_that_is_longer_than_a_minute_counts_as_one() -> None:
    rate = Rate()
    rate.read(0, 0)
    assert rate.read(600, 600) == 1


def test_a_disk_is_told_with_what_only_pins_hold_there_and_one_that_is_gone_is_left_out(
    tmp_path: Path,
) -> None:
    [disk] = disks([(tmp_path, 50_000), (tmp_path / "gone", 1)], 10**9)
    assert (disk.path, disk.spool, disk.budget) == (str(tmp_path), 50_000, 10**9)
    assert 0 < disk.free < disk.total
