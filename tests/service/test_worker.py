"""The worker role: looks and sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.catalogue.fresh import fresh
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import Transient
from ckptsync.service import worker as module
from ckptsync.service.periodic import looping
from ckptsync.service.store import ServiceStore
from ckptsync.service.worker import (
    LONGEST_REST,
    SHARE,
    UNSETTLED_EVERY,
    Directories,
    WorkerRole,
    pause,
    rest_after,
    worker_lines,
    worker_options,
)
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store, open_store
from ckptsync.worker import queue
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.result import Failure, Progress, Repaired, WorkerResult
from ckptsync.worker.scanner import Scan
from ckptsync.worker.worker import Worker
from tests.ticks import until

pytestmark = pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")


def configured(tmp_path: Path, text: str) -> tuple[Config, Store]:
    store = create_store(str(tmp_path / "store"))
    return read(text.format(tmp=tmp_path) + f"store: {{url: {store.url}}}\n", "c", {}), store


class Watched:
    """A store that counts what it is asked, and can be held up, at all or at one name; or is away, or refuses to be written to."""

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
        assert self.held or self.go_on.wait(20)
        return getattr(self._store, name)  # type: ignore[no-any-return]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write(checkpoint: Path, size: int = 2000) -> None:
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(os.urandom(size))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": int(checkpoint.name.split("-")[1])}))


@contextmanager
def watching(tmp_path: Path, more: str = "quiet: 0, unmarked: 0") -> Iterator[tuple[WorkerRole, Watched]]:
    config, store = configured(tmp_path, "worker: {{runs: ['{tmp}/out/*'], " + more + "}}\n")
    watched = Watched(store)
    found = WorkerRole(config, "n0", watched, print)  # type: ignore[arg-type]
    found.begin()
    try:
        yield found, watched
    finally:
        found.close()


def send(found: WorkerRole) -> None:
    """Plan, carry all, and say so."""
    found.send()
    for _ in range(100):
        for lane in found.carrying:
            lane()
        if found._lanes.is_drained:
            break
    found.send()


def locations(store: Watched) -> set[str]:
    return {p.location for p in fresh(open_store(store.url)).readable}


def look_twice(found: WorkerRole) -> None:
    """What vanishes is sent only if it was seen at rest."""
    found.look()
    until(lambda: False, 0.6)
    found._next = 0
    found.look()


def asks(found: WorkerRole, store: Watched) -> int:
    """How often the store is asked anything by a look and a send."""
    before = store.asked
    found.look()
    send(found)
    return store.asked - before


def pins(run: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in (run / "_ckptsync" / "pins").glob("checkpoint-*")}


def test_what_appears_while_a_send_is_held_up_is_pinned_and_what_was_held_up_is_sent(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path) as (found, store):
        write(out / "run" / "checkpoint-1")
        found.look()
        store.go_on.clear()
        sending = threading.Thread(target=send, args=(found,))
        sending.start()
        assert until(lambda: store.asked)
        write(out / "run" / "checkpoint-2")
        look_twice(found)
        shutil.rmtree(out / "run" / "checkpoint-1")
        shutil.rmtree(out / "run" / "checkpoint-2")
        assert pins(out / "run") == {"checkpoint-1", "checkpoint-2"}
        store.go_on.set()
        sending.join()
        found.look()
        send(found)
    assert {p.location for p in fresh(open_store(store.url)).readable} == {"checkpoint-1", "checkpoint-2"}


def test_what_is_finished_is_sent_at_once_and_what_is_not_when_it_will_be(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path, "quiet: 20s, unmarked: 20s") as (found, _):
        sends: list[float] = []
        found.sending.soon = sends.append
        write(out / "run" / "checkpoint-1")
        found.look()
        assert 19 < sends[0] <= 20
    shutil.rmtree(out / "run")
    with watching(tmp_path) as (found, _):
        found.sending.soon = sends.append
        write(out / "run" / "checkpoint-1")
        found.look()
        assert sends[1:] == [0]


def test_while_a_checkpoint_is_written_one_looks_again_within_half_a_second_and_later_seldom(tmp_path: Path, out: Path) -> None:
    wishes: list[float] = []
    for seconds in (0, 200, 10_000):
        with watching(tmp_path, "scan_every: 30s") as (found, _):
            found.looking.soon = wishes.append
            found._moved = (now := time.monotonic()) - seconds
            found._arrange(now, [Scan(due=None), Scan(due=100.0)])
            assert found._next == now + wishes[-1]
    assert [round(wish) for wish in wishes[1:]] == [10, 30]
    assert wishes[0] == UNSETTLED_EVERY


def test_a_worker_that_has_nothing_to_do_asks_the_store_nothing_and_anything_that_moves_ends_that(
    tmp_path: Path, out: Path
) -> None:
    with watching(tmp_path) as (found, store):
        write(out / "run" / "checkpoint-1")
        for _ in range(3):
            found.look()
            send(found)
        assert until(lambda: asks(found, store) == 0)
        write(out / "run" / "checkpoint-2")
        assert asks(found, store) > 0
        assert until(lambda: asks(found, store) == 0)
        shutil.rmtree(out / "run" / "checkpoint-1")
        assert asks(found, store) > 0
    assert len(fresh(open_store(store.url)).readable) == 2


def test_memory_is_given_back_when_all_is_sent_and_once_more_at_the_next_tick(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr("ckptsync.service.worker.give_back_memory", lambda: given.append(1))
    with watching(tmp_path) as (found, store):
        write(out / "run" / "checkpoint-1")
        for _ in range(3):
            found.look()
            send(found)
        assert until(lambda: asks(found, store) == 0)
        before = len(given)
        assert before >= 2
        found.send()
        found.send()
        assert len(given) == before, "and not at every tick"


def test_what_only_pins_hold_is_told_of_a_disk_once_the_trainer_has_removed_it(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path, "quiet: 50s, unmarked: 50s") as (found, _):
        write(out / "run" / "checkpoint-1")
        look_twice(found)
        assert found.held() == [(out / "run", 0)]
        size = sum(path.stat().st_size for path in (out / "run" / "checkpoint-1").iterdir())
        shutil.rmtree(out / "run" / "checkpoint-1")
        found._next = 0
        found.look()
        assert found.held() == [(out / "run", size)]


def test_looks_that_cost_much_come_seldom_while_nothing_is_on_its_way_and_as_ever_while_something_is(
    tmp_path: Path, out: Path
) -> None:
    with watching(tmp_path, "scan_every: 30s") as (found, _):
        rests = []
        for cost, is_idle, heard in (
            (0.001, True, True),
            (0.06, True, True),
            (9.0, True, True),
            (9.0, False, True),
            (9.0, True, False),
        ):
            found._look_cost, found._is_idle = cost, is_idle
            found._is_heard = lambda told=heard: told  # type: ignore[method-assign, misc]
            found._arrange(0.0, [Scan(due=None)])
            rests.append(round(found._next))
    assert rests == [60, 200, 600, 30, 30]


def test_a_store_that_went_away_is_asked_again_within_seconds_and_never_in_a_hot_loop(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path, "quiet: 0, unmarked: 0, scan_every: 30s") as (found, store):
        write(out / "run" / "checkpoint-1")
        store.is_away = True
        found.look()
        for n in range(6):
            assert "away" in str(found.send().errors)
            assert found._sent.queue == ("run/checkpoint-1",)
            assert min(15, 2 * 2**n) * 0.4 < found._due - time.monotonic() <= min(15, 2 * 2**n)
            found._due = 0.0  # as if so much time had passed
        store.is_away = False
        send(found)
        assert not found._sent.errors
        assert found._due > time.monotonic() + 100
        store.is_away, found._due = True, 0.0
        found.send()
        assert found._due - time.monotonic() <= 2, "the next outage begins anew"
        store.is_away = False
    assert {p.location for p in fresh(open_store(store.url)).readable} == {"checkpoint-1"}


def test_a_save_that_fails_in_its_lane_is_tried_again_soon_and_its_failure_is_one_line(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path, "quiet: 0, unmarked: 0, scan_every: 30s") as (found, store):
        write(out / "run" / "checkpoint-1")
        found.look()
        store.is_refusing = True
        told = []
        for _ in range(3):
            send(found)
            told += [line.text for line in found._sent.lines if line.is_error]
            found._due = 0.0
        assert len(told) == 3
        assert len(set(told)) == 1
        store.is_refusing = False
        send(found)
        assert not found._sent.errors
    assert {p.location for p in fresh(open_store(store.url)).readable} == {"checkpoint-1"}


def test_a_small_save_is_sent_while_a_large_one_of_another_directory_is_held_up(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SMALL", 5000)
    with (
        watching(tmp_path) as (found, store),
        looping([found.looking, found.sending, *found.carrying]),
    ):
        store.held = "full/checkpoint-1/weights.bin"
        write(out / "full" / "checkpoint-1", 9000)
        assert until(store.reached.is_set, 30)
        write(out / "lora" / "checkpoint-2")
        assert until(lambda: locations(store) == {"checkpoint-2"}, 30)
        store.go_on.set()
        assert until(lambda: locations(store) == {"checkpoint-1", "checkpoint-2"}, 30)


def test_a_job_that_begins_is_served_by_a_glance_without_any_event(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path) as (found, _):
        found.look()
        assert found._watch
        found._watch.close()
        write(out / "new" / "checkpoint-1")
        found.look()
        assert pins(out / "new") == {"checkpoint-1"}


def test_before_the_store_is_there_what_appears_is_pinned(tmp_path: Path, out: Path) -> None:
    config, store = configured(tmp_path, "worker: {{runs: ['{tmp}/out/*'], quiet: 0, unmarked: 0}}\n")
    awaited = ServiceStore(store.url, lambda: False)
    found = WorkerRole(config, "n0", awaited, print)
    found.begin()
    write(out / "run" / "checkpoint-1")
    look_twice(found)
    assert "not reached yet" in str(found.send().errors)
    assert pins(out / "run") == {"checkpoint-1"}
    shutil.rmtree(out / "run" / "checkpoint-1")
    awaited.came(store)
    found.look()
    send(found)
    found.close()
    assert [p.location for p in fresh(store).readable] == ["checkpoint-1"]


def test_what_the_configuration_says_of_a_worker_is_what_it_is_told(tmp_path: Path) -> None:
    text = "worker: {{runs: ['{tmp}/out'], order: newest, superseded: drop, send: weights, exclude: ['rng*'], include: ['*'], quiet: 1s, unmarked: 2s"
    config, _ = configured(
        tmp_path, text + ", keep_pins: 3, spool_budget: 1GB, spool_full: 'every:5', clean: verified, keep_local: 4}}\n"
    )
    runs = (RunDir("out", tmp_path / "out"),)
    assert worker_options(config, "n0", runs) == WorkerOptions(
        "n0", runs, 1, 2, 3, 4, "newest", "drop", "weights", ("*",), ("rng*",), 10**9, "every:5", "verified", 4
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_what_other_users_put_in_the_way_ends_no_worker_and_is_a_problem_with_its_reason(tmp_path: Path, out: Path) -> None:
    (out / "theirs").mkdir()
    os.chown(out / "theirs", 65534, 65534)
    with watching(tmp_path) as (found, store):
        write(out / "run" / "checkpoint-1")
        (out / "linked").mkdir()
        (out / "linked" / "_ckptsync").mkdir()
        os.chown(out / "linked" / "_ckptsync", 65534, 65534)
        found.look()
        errors = found.look().errors
        assert any("theirs: left out" in error and "it belongs to uid 65534" in error for error in errors)
        assert any("linked/_ckptsync: belongs to uid 65534" in error for error in errors)
        send(found)
        assert locations(store) == {"checkpoint-1"}


def test_a_save_whose_output_directory_is_removed_while_it_is_sent_is_told_of_though_nobody_looks_there_any_more(
    tmp_path: Path, out: Path
) -> None:
    with watching(tmp_path) as (found, store):
        write(out / "job/checkpoint-1")
        found.look()
        store.held = "job/checkpoint-1/weights.bin"
        found.send()
        carrying = [threading.Thread(target=lane) for lane in found.carrying]
        for each in carrying:
            each.start()
        assert store.reached.wait(60)
        shutil.rmtree(out / "job")
        found.look()
        assert found.runs() == {}
        store.held = ""
        store.go_on.set()
        for each in carrying:
            each.join()
        found._due = 0.0  # as when `scan_every` has passed
        found.send()
        found._next = 0.0
        (note,) = [note for note in found.look().notes if "lost" in note]
        assert note.startswith("lost job/checkpoint-1: its files were removed before all of them were stored; the store has ")
        assert found._parting == {}


@given(st.floats(0, 1e6), st.floats(0, 300))
def test_what_looks_in_vain_takes_its_share_of_a_core_and_comes_all_the_same(cost: float, least: float) -> None:
    rest = rest_after(cost, least)
    assert rest >= least
    assert rest <= max(least, LONGEST_REST)
    assert rest >= LONGEST_REST or cost / rest <= SHARE * 1.001 if rest else not cost


def test_each_pause_before_a_store_is_asked_again_is_drawn_from_its_upper_half() -> None:
    for tries, longest in ((1, 2.0), (3, 8.0), (2000, 15.0)):
        assert all(longest / 2 <= pause(tries) <= longest for _ in range(100))


def manned(tmp_path: Path, count: int) -> Directories:
    found, store = Directories(), MemoryStore()
    runs = [RunDir(f"run-{n}", tmp_path / f"run-{n}") for n in range(count)]
    for run in runs:
        run.path.mkdir()
    found.retain({run: Worker(WorkerOptions("n0", (run,)), store) for run in runs})
    return found


def looked_at(posts: Directories, now: float) -> list[str]:
    """After a glance."""
    posts.stir(now)
    due = [post for post in posts if post.is_due(now, 30.0)]
    for post in due:
        post.look(now)
    return [post.run.name for post in due]


def test_each_is_looked_at_first_then_where_something_moved_and_now_and_then_all(tmp_path: Path) -> None:
    posts = manned(tmp_path, 3)
    assert looked_at(posts, 100.0) == ["run-0", "run-1", "run-2"]
    assert looked_at(posts, 101.0) == []
    (tmp_path / "run-1" / "logs").mkdir()
    assert looked_at(posts, 102.0) == ["run-1"]
    assert looked_at(posts, 131.0) == ["run-0", "run-2"]


def test_a_hint_is_of_one_directory_or_of_any(tmp_path: Path) -> None:
    posts = manned(tmp_path, 2)
    looked_at(posts, 100.0)
    posts.hint(str(tmp_path / "run-1"))
    assert posts.stir(101.0)
    assert looked_at(posts, 101.0) == ["run-1"]
    posts.hint("")
    assert looked_at(posts, 102.0) == ["run-0", "run-1"]


def test_what_is_being_written_is_looked_at_every_half_second_and_ever_more_seldom_while_nothing_moves(tmp_path: Path) -> None:
    posts = manned(tmp_path, 2)
    looked_at(posts, 99.0)
    (tmp_path / "run-0" / "checkpoint-1").mkdir()
    (tmp_path / "run-0" / "checkpoint-1" / "model.safetensors").write_bytes(b"half")
    seen = [now / 2 for now in range(200, 300) if looked_at(posts, now / 2) == ["run-0"]]
    assert seen[:4] == [100.0, 100.5, 101.0, 101.5]
    assert seen[-1] - seen[-2] >= 2.0


def test_of_very_many_that_are_still_some_are_glanced_at_in_turn_and_none_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts = manned(tmp_path, 10)
    looked_at(posts, 100.0)
    monkeypatch.setattr(module, "IN_TURN", 9)  # each has three: itself, its pins, and one more
    glanced = [{post.run.name for post in posts._glanced(101.0 + n)} for n in range(5)]
    assert {len(turn) for turn in glanced} == {3}
    assert set.union(*glanced) == {f"run-{n}" for n in range(10)}
    (tmp_path / "run-9" / "checkpoint-1").mkdir()
    assert [looked_at(posts, 110.0 + n) for n in range(4)].count(["run-9"]) == 1


def test_what_was_seen_a_while_ago_is_due_so_much_earlier(tmp_path: Path) -> None:
    (post,) = manned(tmp_path, 1)
    post.found, post.at = Scan(due=10.0), 100.0
    assert [post.told(now).due for now in (100.0, 104.0, 200.0)] == [10.0, 6.0, 0.0]


def test_a_worker_tells_phases_and_nothing_that_counts_down() -> None:
    waiting = [Progress("a", "checkpoint-1", 0, "waiting", f"finished if nothing changes for {s} s") for s in (9, 8)]
    texts = {line.text for progress in waiting for line in worker_lines(WorkerResult("n0", (progress,)))}
    assert texts == {"phase=waiting run=a checkpoint=checkpoint-1"}
    sent = Progress("a", "checkpoint-1", 0, "sent", "sent", "checkpoint-1~ab", 7, 1000, ("odd name",))
    [line] = worker_lines(WorkerResult("n0", (sent,)))
    assert line.text == 'phase=sent run=a checkpoint=checkpoint-1 location=checkpoint-1~ab files=7 bytes=1000 notes="odd name"'
    assert not list(worker_lines(WorkerResult("n0", (Progress("a", "checkpoint-1", 0, "stored", "stored"),))))


def test_what_was_missed_is_an_error_and_a_note_is_none() -> None:
    missed = Progress("a", "checkpoint-1", 0, "missed", "removed before it was whole")
    lines = list(worker_lines(WorkerResult("n0", (missed,), notes=("the spool is full",))))
    assert [line.is_error for line in lines] == [True, False]
    assert lines[0].text == 'phase=missed run=a checkpoint=checkpoint-1 detail="removed before it was whole"'
    assert lines[1].text == 'phase=note detail="the spool is full"'


def test_a_worker_tells_repairs_and_failures() -> None:
    repairs = (Repaired("a", "r1", "checkpoint-1/x"), Repaired("a", "r1", "checkpoint-1/y", "these bytes are gone"))
    failure = Failure("a", "checkpoint-1", "StoreError", "away", "look", 4)
    lines = list(worker_lines(WorkerResult("n0", repairs=repairs, failures=(failure,))))
    assert [line.text.split()[0] for line in lines] == ["phase=repaired", "phase=not-repaired", "phase=failed"]
    assert [line.is_error for line in lines] == [False, False, True]
    assert len({line.key for line in lines}) == 3


PROBE = """
import ctypes, sys
from ckptsync.service.worker import give_back_memory as give_back

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024

if not hasattr(ctypes.CDLL(None), "malloc_trim"):
    sys.exit(77)
kept = [ctypes.create_string_buffer(b"x" * 100_000, 100_000) for _ in range(400)]
kept = kept[::10]  # the heap cannot shrink by itself below what is still used
before = resident()
give_back()
print(before - resident())
"""


def test_what_was_freed_below_what_is_still_used_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no malloc_trim here")
    assert int(done.stdout) > 30_000_000
