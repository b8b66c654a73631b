"""The worker role: looks and sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.records.progress import Progress
from ckptsync.service.directory_changes import directory_states
from ckptsync.service.log import Line
from ckptsync.service.process_control import Locks
from ckptsync.service.store_connection import ServiceStore
from ckptsync.service.worker_role import (
    LONGEST_REST,
    UNFINISHED_EVERY,
    WorkerRole,
    rest_after,
    worker_lines,
    worker_options,
)
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, open_store
from ckptsync.worker import queue
from ckptsync.worker.logs import RunLogs
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.results import (
    Failure,
    RepairedFile,
    UploadProgress,
    WorkerResult,
    describe_failure,
)
from ckptsync.worker.scanner import Scan
from ckptsync.worker.worker import Worker
from tests.service.test_tasks import loop
from tests.support.waiting import until
from tests.support.worker_in_process import is_drained

pytestmark = pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")


def configured(tmp_path: Path, text: str) -> tuple[Config, Store]:
    store = create_store(str(tmp_path / "store"))
    return read(text.format(tmp=tmp_path) + f"store: {{url: {store.url}}}\n", "c", {}), store


class Watched:
    """A store that counts what it is asked, and can be held up, at all or at one name.

    Or is away, or refuses to be written to.
    """

    is_away = is_refusing = False
    held = ""

    def __init__(self, store: Store) -> None:
        self.url, self.late, self.is_exclusive = store.url, store.late, store.is_exclusive
        self.asked = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self._store = store
        self.reached = threading.Event()

    def create(self, name: str, *given: object) -> object:
        if name == self.held:
            self.go_on.clear()
            self.reached.set()
            assert self.go_on.wait(60)
        if self.is_refusing:
            raise Transient("away", hint=f"given up after {self.asked} tries in {self.asked} s")
        self.asked += 1
        return self._store.create(name, *given)  # type: ignore[arg-type, func-returns-value]

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.asked += 1
        if self.is_away:
            raise Transient("away")
        assert self.held or self.go_on.wait(60)
        return getattr(self._store, name)  # type: ignore[no-any-return]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write(checkpoint: Path, size: int = 2000) -> None:
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(os.urandom(size))
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"global_step": int(checkpoint.name.split("-")[1])})
    )


AT_ONCE = "quiet: 0, unmarked: 0"


@contextmanager
def watching(out: Path, more: str = AT_ONCE) -> Iterator[tuple[WorkerRole, Watched]]:
    config, store = configured(out.parent, "worker: {{runs: ['{tmp}/out/*'], " + more + "}}\n")
    watched = Watched(store)
    found = WorkerRole(config, "n0", watched, print)  # type: ignore[arg-type]
    found.begin()
    try:
        yield found, watched
    finally:
        found.close()


def upload(found: WorkerRole) -> None:
    found._plan_at = 0.0
    found.planning()
    for _ in range(100):
        for lane in found.uploading:
            lane()
        if is_drained(found._queues):
            break
    found._has_results = True
    found.planning()


@pytest.mark.parametrize("is_during", [False, True])
def test_an_upload_that_ends_just_before_a_plan_or_during_it_is_logged(
    out: Path, *, is_during: bool
) -> None:
    with watching(out) as (found, _):
        write(out / "a" / "checkpoint-1")
        found.scanning()
        found.planning()
        while not is_drained(found._queues):
            for lane in found.uploading:
                lane()
        for one in found._directories.values() if is_during else ():
            one.worker.plan(time.monotonic())  # it finds the save stored
        found._plan_at = 0.0
        found.planning()
        assert [line.text.split()[0] for line in found.planning.outcome.lines] == ["phase=sent"]


def locations(store: Watched) -> set[str]:
    return {p.location for p in read_state(open_store(store.url)).readable}


def scan_twice(found: WorkerRole) -> None:
    """What vanishes is uploaded only if it was seen at rest."""
    found.scanning()
    until(lambda: False, 0.6)
    rescan(found)


def rescan(found: WorkerRole) -> None:
    for one in found._directories.values():
        one.next_scan = 0.0
    found.scanning()


def asks(found: WorkerRole, store: Watched) -> int:
    """How often the store is asked anything when each task runs once."""
    before = store.asked
    for task in (found.scanning, found.planning, *found.uploading, found.planning):
        task()
    return store.asked - before


def pins(run: Path) -> set[str]:
    found = (run / "_ckptsync" / "pins").glob("checkpoint-*")
    return {path.name.partition(".")[0] for path in found}


def test_a_plan_comes_at_once_for_what_is_finished_and_a_scan_when_a_save_will_be(
    out: Path,
) -> None:
    with watching(out, f"scan_every: 30s, {AT_ONCE}") as (found, _):
        upload(found)
        write(out / "run" / "checkpoint-1")
        found.scanning()
        assert found.planning.due <= time.monotonic()
    shutil.rmtree(out / "run")
    with watching(out, "scan_every: 30s, quiet: 20s, unmarked: 20s") as (found, _):
        upload(found)
        assert found._watch
        found._watch.close()
        write(out / "run" / "checkpoint-1")
        found.scanning()
        found._hints.clear()
        [one] = found._directories.values()
        one.state = directory_states(one.folders)
        # nothing else asks for a scan soon
        one.changed_at, one.next_scan = time.monotonic() - 3000, 0.0
        found.scanning()
        assert 0 < one.next_scan - time.monotonic() <= 20


def test_a_plan_knows_what_came_and_what_was_finished_after_the_last_scan(out: Path) -> None:
    with watching(out, "quiet: 0.5s, unmarked: 0.5s") as (found, store):
        write(out / "run" / "checkpoint-1")
        found.scanning()
        write(out / "run" / "checkpoint-2")
        found._plan_at = 0.0
        found.planning()
        assert set(found.planning.outcome.queue) == {"run/checkpoint-1", "run/checkpoint-2"}
        time.sleep(0.5)
        upload(found)
        assert locations(store) == {"checkpoint-1", "checkpoint-2"}


def test_a_worker_with_nothing_to_do_asks_the_store_nothing_until_anything_moves(out: Path) -> None:
    with watching(out) as (found, store):
        write(out / "run" / "checkpoint-1")
        for _ in range(3):
            found.scanning()
            upload(found)
        assert until(lambda: asks(found, store) == 0)
        write(out / "run" / "checkpoint-2")
        assert asks(found, store) > 0
        assert until(lambda: asks(found, store) == 0)
        shutil.rmtree(out / "run" / "checkpoint-1")
        found.scanning()
        assert found.planning.due <= time.monotonic() + found._every
    assert locations(store) == {"checkpoint-1", "checkpoint-2"}


def test_an_idle_worker_gives_itself_no_hints_and_a_new_file_is_one(out: Path) -> None:
    with watching(out) as (found, store):
        write(out / "run" / "checkpoint-1")
        scan_twice(found)
        upload(found)
        assert until(lambda: asks(found, store) == 0)
        until(lambda: False, 0.5)
        found._hints.clear()
        scan_twice(found)
        upload(found)
        rescan(found)
        assert not until(lambda: found._hints, 0.5)
        (out / "run" / "checkpoint-1" / "more").write_text("x")
        assert until(lambda: found._hints)


def test_memory_is_released_when_all_is_uploaded_and_not_after_each_run(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr("ckptsync.service.worker_role.give_back_memory", lambda: released.append(1))
    with watching(out) as (found, store):
        write(out / "run" / "checkpoint-1")
        found.scanning()
        upload(found)
        assert released == [1]
        assert until(lambda: asks(found, store) == 0)
        upload(found)
        assert released == [1]


def test_what_only_pins_hold_is_counted_once_the_trainer_has_removed_it(out: Path) -> None:
    with watching(out, "quiet: 50s, unmarked: 50s") as (found, _):
        write(out / "run" / "checkpoint-1")
        scan_twice(found)
        assert found.pinned_bytes() == [(out / "run", 0)]
        size = sum(path.stat().st_size for path in (out / "run" / "checkpoint-1").iterdir())
        shutil.rmtree(out / "run" / "checkpoint-1")
        rescan(found)
        assert found.pinned_bytes() == [(out / "run", size)]


def test_scans_and_plans_come_ever_more_seldom_while_nothing_changes_and_soon_after_a_change(
    out: Path,
) -> None:
    (out / "run").mkdir()
    with watching(out, "scan_every: 30s") as (found, _):
        upload(found)
        [one] = found._directories.values()
        for still, rest in ((0, 30), (45, 45), (100, 100), (10_000, 300)):
            found.scanning()
            one.changed_at = found._changed_at = time.monotonic() - still
            found._hints.clear()
            one.state = directory_states(one.folders)
            rescan(found)
            assert one.next_scan - time.monotonic() == pytest.approx(rest, abs=7)
            upload(found)
            assert found._plan_at - time.monotonic() == pytest.approx(rest, abs=7)
        found.hint(str(out / "run"))
        found.scanning()
        assert one.next_scan - time.monotonic() == pytest.approx(30, abs=7)
        assert found._plan_at - time.monotonic() <= 30


@pytest.mark.parametrize(("every", "checks"), [("30s", 1.0), ("5m", 10.0), ("500ms", 1.0)])
def test_who_scans_seldom_checks_as_seldom_in_proportion(
    out: Path, every: str, checks: float
) -> None:
    with watching(out, f"scan_every: {every}") as (found, _):
        assert found.scanning.every == checks


def test_a_store_that_is_away_is_asked_again_within_seconds_and_never_in_a_hot_loop(
    out: Path,
) -> None:
    with watching(out, "quiet: 0, unmarked: 0, scan_every: 30s") as (found, store):
        write(out / "run" / "checkpoint-1")
        store.is_away = True
        found.scanning()
        for n in range(6):
            found._plan_at = 0.0  # as if so much time had passed
            before = time.monotonic()
            found.planning()
            assert "away" in str(found.planning.outcome.errors)
            assert found.planning.outcome.queue == ("run/checkpoint-1",)
            longest = min(15, 2 * 2**n)
            assert longest * 0.4 < found._plan_at - before
            assert found._plan_at - time.monotonic() <= longest
        store.is_away = False
        upload(found)
        assert not found.planning.outcome.errors
        assert found._plan_at > time.monotonic() + 20
        store.is_away, found._plan_at = True, 0.0
        found.planning()
        assert found._plan_at - time.monotonic() <= 2, "the next outage begins anew"
        store.is_away = False
    assert locations(store) == {"checkpoint-1"}


def test_a_save_that_fails_in_its_queue_is_tried_again_soon_and_its_failure_is_one_line(
    out: Path,
) -> None:
    with watching(out, "quiet: 0, unmarked: 0, scan_every: 30s") as (found, store):
        write(out / "run" / "checkpoint-1")
        found.scanning()
        store.is_refusing = True
        failures = []
        for _ in range(3):
            upload(found)
            assert found._plan_at - time.monotonic() <= 15
            failures += [
                line.text for line in found.planning.outcome.lines if line.level == "error"
            ]
        assert len(failures) == 3
        assert len(set(failures)) == 1
        store.is_refusing = False
        upload(found)
        assert not found.planning.outcome.errors
    assert locations(store) == {"checkpoint-1"}


def test_a_small_save_is_uploaded_while_a_large_one_of_another_directory_is_held_up(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SMALL_SAVE", 5000)
    with (
        watching(out) as (found, store),
        loop(found.scanning, found.planning, *found.uploading),
    ):
        store.held = "full/checkpoint-1/weights.bin"
        write(out / "full" / "checkpoint-1", 9000)
        assert until(store.reached.is_set)
        write(out / "lora" / "checkpoint-2")
        assert until(lambda: locations(store) == {"checkpoint-2"})
        store.go_on.set()
        assert until(lambda: locations(store) == {"checkpoint-1", "checkpoint-2"})


def test_an_upload_gives_way_to_a_scan_but_not_to_one_that_never_ends(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a scan of thousands of files takes many times as long, and rotation is quicker."""
    held: list[bool] = []
    monkeypatch.setattr(queue, "SCAN_FIRST", 60.0)
    with watching(out) as (found, store):
        really = Worker.scan

        def watched(worker: Worker, now: float) -> Scan:
            held.append(found._queues.scan_lock.locked())
            return really(worker, now)

        monkeypatch.setattr(Worker, "scan", watched)
        write(out / "run" / "checkpoint-1")
        found.scanning()
        assert held == [True]
        with found._queues.scan_lock:
            uploading = threading.Thread(target=upload, args=(found,))
            uploading.start()
            assert not until(lambda: locations(store) != set(), 0.5)
        uploading.join(60)
        assert locations(store) == {"checkpoint-1"}
        monkeypatch.setattr(queue, "SCAN_FIRST", 0.01)
        write(out / "run" / "checkpoint-2")
        found.scanning()
        with found._queues.scan_lock:
            upload(found)
        assert locations(store) == {"checkpoint-1", "checkpoint-2"}


def test_a_training_that_begins_is_seen_without_any_event(out: Path) -> None:
    with watching(out) as (found, _):
        found.scanning()
        assert found._watch
        found._watch.close()
        write(out / "new" / "checkpoint-1")
        found.scanning()
        assert pins(out / "new") == {"checkpoint-1"}


def test_before_the_store_is_there_what_appears_is_pinned(tmp_path: Path, out: Path) -> None:
    runs = "worker: {{runs: ['{tmp}/out/*'], quiet: 0, unmarked: 0}}\n"
    config, store = configured(tmp_path, runs)
    awaited = ServiceStore(store.url, lambda: False)
    found = WorkerRole(config, "n0", awaited, print)
    found.begin()
    write(out / "run" / "checkpoint-1")
    scan_twice(found)
    found.planning()
    assert "not reached yet" in str(found.planning.outcome.errors)
    assert pins(out / "run") == {"checkpoint-1"}
    shutil.rmtree(out / "run" / "checkpoint-1")
    awaited.connect(store)
    found.scanning()
    upload(found)
    found.close()
    assert [p.location for p in read_state(store).readable] == ["checkpoint-1"]


def test_what_the_configuration_says_of_a_worker_is_what_it_is_told(tmp_path: Path) -> None:
    text = (
        "worker: {{runs: ['{tmp}/out'], order: newest, superseded: drop, send: weights, exclude:"
        " ['rng*'], include: ['*'], quiet: 1s, unmarked: 2s, keep_pins: 3, spool_budget: 1GB,"
        " spool_full: 'every:5', clean: verified, keep_local: 4}}\n"
    )
    config, _ = configured(tmp_path, text)
    run = RunDir("out", tmp_path / "out")
    told: dict[str, Any] = {"order": "newest", "superseded": "drop", "send": "weights"}
    told |= {"include": ("*",), "exclude": ("rng*",), "quiet": 1, "unmarked": 2, "keep_pins": 3}
    told |= {"spool_budget": 10**9, "spool_full": "every:5", "clean": "verified", "keep_local": 4}
    assert worker_options(config, "n0", run) == WorkerOptions("n0", run, **told)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_what_other_users_put_in_the_way_ends_no_worker_and_is_a_problem_with_its_reason(
    out: Path,
) -> None:
    (out / "theirs").mkdir()
    os.chown(out / "theirs", 65534, 65534)
    with watching(out) as (found, store):
        write(out / "run" / "checkpoint-1")
        (out / "linked").mkdir()
        (out / "linked" / "_ckptsync").mkdir()
        os.chown(out / "linked" / "_ckptsync", 65534, 65534)
        found.scanning()
        errors = found.scanning.outcome.errors
        whose = "it belongs to uid 65534"
        assert any("theirs: left out" in error and whose in error for error in errors)
        assert any("linked/_ckptsync: belongs to uid 65534" in error for error in errors)
        upload(found)
        assert locations(store) == {"checkpoint-1"}


def test_another_workers_directory_is_refused_at_the_start_and_left_out_later(out: Path) -> None:
    (out / "taken").mkdir()
    locks = Locks("n0")
    locks.hold(out / "taken" / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"), watching(out):
        pass
    locks.close()
    shutil.rmtree(out / "taken")
    with watching(out) as (found, store):
        write(out / "run" / "checkpoint-1")
        (out / "taken").mkdir()
        locks.hold(out / "taken" / "_ckptsync")
        found.scanning()
        upload(found)
        [error] = found.scanning.outcome.errors
        assert "another worker of node n0" in error
        assert locations(store) == {"checkpoint-1"}
    locks.close()


def test_a_save_whose_output_directory_is_removed_while_it_is_uploaded_is_reported_all_the_same(
    out: Path,
) -> None:
    with watching(out) as (found, store):
        write(out / "job/checkpoint-1")
        found.scanning()
        store.held = "job/checkpoint-1/weights.bin"
        found.planning()
        uploading = [threading.Thread(target=lane) for lane in found.uploading]
        for each in uploading:
            each.start()
        assert store.reached.wait(60)
        shutil.rmtree(out / "job")
        found.scanning()
        assert found.runs() == {}
        assert [(p.run, p.checkpoint) for p in found.running()] == [("job", "checkpoint-1")]
        store.held = ""
        store.go_on.set()
        for each in uploading:
            each.join()
        found._plan_at = 0.0  # as when `scan_every` has passed
        found.planning()
        found._renew_at = 0.0
        found.scanning()
        (note,) = [note for note in found.scanning.outcome.notes if "lost" in note]
        lost = "lost job/checkpoint-1: its files were removed before all of them were stored"
        assert note.startswith(lost)
        assert found._removed == {}


def test_logs_of_one_run_that_cannot_be_sent_keep_no_others_back(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry(logs: RunLogs) -> tuple[str, ...]:
        monkeypatch.setattr(RunLogs, "carry", lambda _: ("large",))
        raise StoreError("away")

    monkeypatch.setattr(RunLogs, "carry", carry)
    for run in "ab":
        (out / run).mkdir()
    with watching(out) as (found, _):
        found.scanning()
        task = next(iter(found.carrying))
        task()
        assert (task.outcome.errors, task.outcome.notes) == (("logs of a: away",), ("large",))


def test_after_a_scan_that_failed_a_plan_scans_again(out: Path) -> None:
    with watching(out) as (found, _):
        write(out / "run" / "checkpoint-1")
        found.scanning()
        [one] = found._directories.values()
        one.state = directory_states(one.folders)
        one.last_scan = Scan(
            failures=(describe_failure("run", "checkpoint-1", StoreError("unreadable")),)
        )
        assert not one.is_outdated()
        one.last_scan = Scan(
            failures=(describe_failure("run", "", StoreError("stale file handle")),)
        )
        assert one.is_outdated()


@pytest.mark.parametrize(
    ("still", "finishes", "rest"),
    [
        (0.0, None, 30.0),
        (1e9, None, LONGEST_REST),
        (0.0, 100.0, UNFINISHED_EVERY),
        (200.0, 100.0, 10.0),
        (200.0, 3.0, 3.0),
        (1e9, 100.0, 30.0),
        (200.0, 0.0, 10.0),
    ],
)
def test_the_next_scan_waits_longer_the_longer_nothing_changes(
    still: float, finishes: float | None, rest: float
) -> None:
    assert rest_after(still, 30.0, finishes) == rest


def scanned(found: WorkerRole) -> list[str]:
    before = {run: one.last_scan for run, one in found._directories.items()}
    found.scanning()
    return [
        run.name for run, one in found._directories.items() if one.last_scan is not before.get(run)
    ]


def test_a_directory_is_scanned_first_then_where_something_moved_and_now_and_then(
    out: Path,
) -> None:
    for n in range(3):
        (out / f"run-{n}").mkdir()
    with watching(out, "scan_every: 30s") as (found, _):
        assert scanned(found) == ["run-0", "run-1", "run-2"]
        assert found._watch
        found._watch.close()  # now, since the first scan watches again
        found._hints.clear()
        assert scanned(found) == []
        (out / "run-1" / "notes.txt").write_text("x")
        assert scanned(found) == ["run-1"]
        assert scanned(found) == []
        found.hint(str(out / "run-2"))
        assert scanned(found) == ["run-2"]
        found.hint("")
        assert scanned(found) == ["run-0", "run-1", "run-2"]
        assert scanned(found) == []
        found._directories[RunDir("run-0", out / "run-0")].next_scan = 0.0
        assert scanned(found) == ["run-0"]


def lines(
    *progress: UploadProgress,
    running: Mapping[tuple[str, str], Progress] = MappingProxyType({}),
    **rest: Any,
) -> list[Line]:
    return list(worker_lines(WorkerResult("n0", progress, **rest), running))


def test_a_worker_tells_phases_repairs_and_failures_and_nothing_that_counts_down() -> None:
    one = ("a", "checkpoint-1", 0)
    states = set()
    for left in (9, 8):
        why = f"no state yet; finished if nothing changes for {left} s"
        entry = Progress(kind="upload", state="waiting", until=60.0 - left)
        waits = UploadProgress(*one, "waiting", why)
        [line] = lines(waits, running={("a", "checkpoint-1"): entry})
        where = 'run=a checkpoint=checkpoint-1 reason="no state yet"'
        assert line.text == f"phase=waiting {where} until=1970-01-01T00:00:{60 - left}Z"
        states.add(line.state)
    assert len(states) == 1
    done: Any = ("checkpoint-1~ab", 7, 1000, ("odd name",))
    [line] = lines(UploadProgress(*one, "sent", "sent", *done))
    text = "phase=sent run=a checkpoint=checkpoint-1 location=checkpoint-1~ab files=7 bytes=1000"
    assert line.text == f'{text} notes="odd name"'
    assert not lines(UploadProgress(*one, "stored", "stored"))
    missed = UploadProgress(*one, "missed", "removed before it was whole")
    first, second = lines(missed, notes=("the spool is full",))
    text = 'phase=missed run=a checkpoint=checkpoint-1 detail="removed before it was whole"'
    assert (first.text, first.level) == (text, "error")
    assert (second.text, second.level) == ('phase=note detail="the spool is full"', "warning")
    repaired = RepairedFile("a", "r1", "checkpoint-1/x")
    failed = Failure("a", "checkpoint-1", "StoreError", "away", "look", 4)
    lost = RepairedFile("a", "r1", "checkpoint-1/y", "these bytes are gone")
    found = lines(repairs=(repaired, lost), failures=(failed,))
    phases = [line.text.split()[0].removeprefix("phase=") for line in found]
    assert phases == ["repaired", "not-repaired", "failed"]
    assert [line.level for line in found] == ["info", "warning", "error"]
    assert len({line.key for line in found}) == 3


PROBE = """
import ctypes, sys
from ckptsync.service.worker_role import give_back_memory as give_back

def resident():
    return int(next(line for line in open("/proc/self/status") if \
line.startswith("VmRSS")).split()[1]) * 1024

if not hasattr(ctypes.CDLL(None), "malloc_trim"):
    sys.exit(77)
kept = [ctypes.create_string_buffer(b"x" * 100_000, 100_000) for _ in range(400)]
kept = kept[::10]  # the heap cannot shrink by itself below what is still used
before = resident()
give_back()
print(before - resident())
"""


def test_what_was_freed_below_what_is_still_used_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("no malloc_trim here")
    assert int(done.stdout) > 30_000_000
