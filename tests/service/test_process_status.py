"""What a process tells of itself: its heartbeat and its node's facts."""

import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.records.progress import Progress
from ckptsync.service.log import shown
from ckptsync.service.process_control import Stopping, heartbeat
from ckptsync.service.process_status import MOST, Heart, Rate, Roles, disks, survey
from ckptsync.service.store_connection import ServiceStore
from ckptsync.service.tasks import Outcome, Task
from ckptsync.spool import markers
from ckptsync.spool.markers import TrainingProcess, process_path, write_mark
from ckptsync.status.heartbeat import Facts, Heartbeat, read, write, write_facts
from ckptsync.status.nodes import read_nodes
from ckptsync.stores.contract import Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.service.test_run import role
from tests.support.status_examples import waiting

MINE = heartbeat("n0", ("worker",))
LACKS = {"a/.ckptsync/checkpoint-1/report-1-0123456789abcdef.json": ("checkpoint-1/model",)}
QUEUED = ("a/checkpoint-1",)


def busy(*queue: str) -> Roles:
    """A worker with these uploads, whose store is away."""
    outcome = Outcome(
        notes=("spool full",),
        watch={"/data/out": "events"},
        lacks=LACKS,
    )
    task = Task("worker", 1, lambda: outcome, print)
    task()
    task.error = "away"
    roles = Roles([], [task])
    roles.worker = serving = Serving()  # type: ignore[assignment]
    serving.progress = waiting(*queue, since=time.time() - 60)
    return roles


class Serving:
    def __init__(self, **runs: Path) -> None:
        self.found = runs
        self.progress: tuple[Progress, ...] = ()

    def running(self) -> tuple[Progress, ...]:
        return self.progress

    def runs(self) -> dict[str, Path]:
        return self.found

    def pinned_bytes(self) -> list[tuple[Path, int]]:
        return [(path, 3) for path in self.found.values()]


@pytest.fixture
def store(tmp_path: Path) -> ServiceStore:
    found = ServiceStore(str(tmp_path), lambda: False)
    found.connect(PosixStore(str(tmp_path)))
    return found


@pytest.fixture
def stop() -> Stopping:
    return Stopping()


def seen(store: Store) -> Heartbeat:
    found = read(store, "n0", ("worker",))
    assert found
    return found


def facts(store: Store) -> Facts:
    [found] = read_nodes(store).facts.values()
    assert isinstance(found, Facts)
    return found


def test_queue_and_errors_of_all_roles_are_those_of_their_last_runs() -> None:
    queued = Outcome(queue=("run/checkpoint-1",), errors=("run: torn",))
    worker = role("worker", queued, StoreError("away"))
    head = role("head", Outcome(queue=("run/checkpoint-1", "run/checkpoint-2")))
    scan = role("scan", Outcome(notes=("spool full",), watch={"/a": "polling"}))
    roles = Roles([scan], [worker])
    roles.periodic.append(head)
    for task in (*roles.all, worker):
        task()
    found = roles.outcome()
    assert found.queue == ("run/checkpoint-1", "run/checkpoint-2")
    assert found.errors == ("worker: away", "run: torn")
    assert (found.notes, found.watch) == (("spool full",), {"/a": "polling"})
    assert roles.status() == "worker waits; head waits; 2 to upload; 2 errors"


def test_each_beat_tells_what_is_on_the_way_now_and_a_name_that_is_no_text_silences_none(
    store: ServiceStore, stop: Stopping
) -> None:
    working = busy(*(f"a/checkpoint-{n}" for n in range(MOST + 1)))
    assert isinstance(working.worker, Serving)
    working.worker.progress += waiting("b/last", state="uploading", since=time.time())
    heart = Heart(store, MINE, working, stop)
    heart.beat()
    working.tasks[0].error = os.fsdecode(b"/data/out/r\xe9: away")
    heart.beat()
    told = seen(store)
    assert (told.beat, len(told.running)) == (2, MOST)
    assert told.running[0].run == "b", "what moves comes first"
    assert told.errors == ("worker: /data/out/r\ufffd: away",)
    assert told.written > 0


def test_a_beat_tells_how_long_it_waits_how_fast_it_is_and_how_full_the_disks_are(
    store: ServiceStore, stop: Stopping, tmp_path: Path
) -> None:
    roles = busy(*QUEUED)
    assert isinstance(roles.worker, Serving)
    roles.worker.found["out"] = tmp_path
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    store.write("a/checkpoint-1/model", [bytes(1000)])
    heart.beat()
    told = seen(store)
    assert 60 <= told.written - told.running[0].since < 90
    assert told.sent_bytes > 1000
    assert told.rate > 0
    assert told.lacks == LACKS
    assert [(disk.path, disk.spool) for disk in told.disk] == [(str(tmp_path), 3)]
    assert (told.watch, told.notes) == ({"/data/out": "events"}, ("spool full",))


def test_what_a_node_is_made_of_is_told_once_and_again_when_it_has_changed(
    store: ServiceStore, stop: Stopping, tmp_path: Path
) -> None:
    roles, serving = Roles(), Serving()
    roles.worker = serving  # type: ignore[assignment]
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    first = facts(store)
    heart.beat()
    assert facts(store) == first
    serving.found["run"] = tmp_path
    heart.beat()
    assert list(facts(store).file_systems) == [str(tmp_path)]
    [known] = read_nodes(store).hearts
    assert isinstance(known.content, Heartbeat), "facts are no heartbeat"


def test_of_two_the_second_asks_for_a_stop_with_2_and_leaves_the_firsts_word(
    store: ServiceStore, stop: Stopping
) -> None:
    write(store, replace(MINE, instance="second", started=MINE.started + 1))
    Heart(store, MINE, busy(), stop).beat()
    assert not stop.is_stopping
    first = replace(MINE, instance="first", started=1.0)
    write(store, first)
    heart = Heart(store, MINE, busy(), stop)
    heart.beat()
    heart.farewell()
    assert (stop.is_stopping, stop.code, seen(store)) == (True, 2, first)


def test_a_farewell_says_stopped_and_nothing_on_the_way_and_a_store_that_is_away_is_no_fault(
    store: ServiceStore, stop: Stopping, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roles = busy(*QUEUED)
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    roles.tasks[0].outcome = Outcome(lacks={"a/report-2": ("checkpoint-2/model",)})
    heart.farewell()
    assert (seen(store).stopped, seen(store).queue) == (True, ())
    assert seen(store).lacks == roles.tasks[0].outcome.lacks
    shutil.rmtree(tmp_path / ".ckptsync")
    (tmp_path / ".ckptsync").write_text("a file")
    heart.farewell()
    assert "phase=stopped error=" in caplog.text


class Early(PosixStore):
    """A store whose clock is a minute behind this node's."""

    def names(self, prefix: str) -> Iterator[Entry]:
        return (Entry(e.name, e.size, e.mtime - 60) for e in super().names(prefix))


class Unmeasured(PosixStore):
    """A store whose clock cannot be measured."""

    def names(self, prefix: str) -> Iterator[Entry]:
        if "clocks" in prefix:
            raise StoreError(f"{prefix}: not allowed")
        return super().names(prefix)


@pytest.mark.parametrize(("kind", "expected"), [(PosixStore, 0), (Early, 60e9), (Unmeasured, None)])
def test_the_facts_say_how_far_the_node_s_clock_is_from_the_store_s_where_it_can_be_measured(
    tmp_path: Path, stop: Stopping, kind: type[PosixStore], expected: float | None
) -> None:
    store = kind(str(tmp_path))
    Heart(store, MINE, Roles(), stop).beat()
    offset = facts(store).clock_offset
    assert offset == (None if expected is None else pytest.approx(expected, abs=20e9))
    assert facts(store).kernel


def test_a_clock_that_was_set_is_measured_again(
    tmp_path: Path, stop: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = PosixStore(str(tmp_path)), time.time
    heart = Heart(store, MINE, Roles(), stop)
    heart.beat()
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    heart.beat()
    assert facts(store).clock_offset == pytest.approx(3600e9, abs=60e9)


def begin(out: Path, process: str, train: str, rank: int, at: float) -> None:
    told = {"torch": "2.13", "NCCL_SOCKET_IFNAME": "eth0"} if rank == 0 else {}
    who = ("host", 1, "1", "boot", at, "transformers 5", told, process)
    mark = TrainingProcess(train, rank, 4, 2 if rank else 0, *who)
    write_mark(process_path(out / "_ckptsync", process), mark)


def test_a_node_tells_what_it_is_made_of(tmp_path: Path) -> None:
    found = survey("n0", {"run": tmp_path})
    assert (found.node, found.python) == ("n0", platform.python_version())
    assert found.kernel == platform.release()
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
    pid = os.getpid()
    who = (socket.gethostname(), pid, markers.start_time(pid), markers.boot_id(), 1.0)
    mine = TrainingProcess("t", 0, 2, 2, *who, process="a")
    other = replace(mine, rank=1, process="b")

    def state(*begun: TrainingProcess) -> str:
        for b in begun:
            write_mark(process_path(tmp_path / "_ckptsync", b.process), b)
        return survey("n0", {"run": tmp_path}).trains["run"].state

    assert state(mine, other) == "runs"
    assert state(replace(mine, ended=2.0), other) == "runs"
    assert state(replace(mine, ended=2.0), replace(other, began="1")) == "gone"
    assert state(mine, replace(other, left=2.0)) == "runs"
    excepted = state(replace(mine, left=2.0), replace(other, left=2.0))
    assert excepted == "gone", "an exception ended it"
    assert state(replace(mine, ended=2.0), replace(other, ended=2.0, left=2.0)) == "ended"


def test_a_path_that_is_no_text_can_be_told(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    write_facts(MemoryStore(), survey("n0", {"run": odd}), ("worker",))
    assert shown(odd).endswith("\ufffd")


def test_a_rate_is_over_the_last_minute_and_a_longer_rest_counts_as_one() -> None:
    rate = Rate()
    read = [(0, 0), (30, 300), (60, 300), (90, 300), (120, 6300)]
    assert [rate.read(now, count) for now, count in read] == [0, 10, 5, 0, 100]
    rate = Rate()
    rate.read(0, 0)
    assert rate.read(600, 600) == 1


def test_a_disk_is_told_with_what_only_pins_hold_there_and_one_that_is_gone_is_left_out(
    tmp_path: Path,
) -> None:
    [disk] = disks([(tmp_path, 50_000), (tmp_path / "gone", 1)], 10**9)
    assert (disk.path, disk.spool, disk.budget) == (str(tmp_path), 50_000, 10**9)
    assert 0 < disk.free < disk.total


def test_another_state_is_told_within_a_second_and_bytes_that_move_each_five(
    store: ServiceStore, stop: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    roles = busy()
    assert isinstance(roles.worker, Serving)
    heart = Heart(store, MINE, roles, stop)
    heart.beat()
    assert not heart.compare_states()
    roles.worker.progress = waiting(*QUEUED)
    assert not heart.compare_states()
    now[0] += 1.0
    assert heart.compare_states()
    heart.beat()
    assert seen(store).queue == QUEUED
    now[0] += 20.0
    assert not heart.compare_states(), "it waits all the while"
    for done in (0, 10**6):
        roles.worker.progress = waiting(*QUEUED, state="uploading", done=done, total=10**7)
        now[0] += 5.0
        assert heart.compare_states()
        heart.beat()
        now[0] += 2.0
        assert not heart.compare_states()
    [upload] = seen(store).running
    assert (upload.done, upload.total) == (10**6, 10**7)
    assert upload.rate == pytest.approx(10**6 / 7)
    roles.worker.progress = ()
    assert heart.compare_states() is False, "it was compared a moment ago"
    now[0] += 1.0
    assert heart.compare_states()


def test_what_moves_is_logged_once_a_minute(
    store: ServiceStore,
    stop: Stopping,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    roles = busy()
    assert isinstance(roles.worker, Serving)
    heart = Heart(store, MINE, roles, stop)
    caplog.set_level("INFO", "ckptsync")
    for done in range(0, 130, 5):
        roles.worker.progress = waiting(*QUEUED, state="uploading", done=done * 10**6, total=10**9)
        heart.beat()
        now[0] += 5.0
    lines = [line for line in caplog.messages if line.startswith("phase=uploading")]
    first = "phase=uploading run=a checkpoint=checkpoint-1 done=60000000 total=1000000000"
    assert lines[0] == f"{first} rate=1000000 left=940"
    assert len(lines) == 2
