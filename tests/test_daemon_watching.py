"""The worker role: looks and sends."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.awaited import Awaited
from ckptsync.daemon.watching import UNSETTLED_EVERY, Watching, worker_options
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, open_store
from ckptsync.worker.looking import Look
from ckptsync.worker.options import RunDir, WorkerOptions
from tests.ticks import until

pytestmark = pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")


def configured(tmp_path: Path, text: str) -> tuple[Config, Store]:
    store = create_store(str(tmp_path / "store"))
    return read(text.format(tmp=tmp_path) + f"store: {{url: {store.url}}}\n", "c", {}), store


class Watched:
    """A store that counts what it is asked, and can be held up."""

    def __init__(self, store: Store) -> None:
        self.url, self.late, self.is_exclusive = store.url, store.late, store.is_exclusive
        self.asked = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.asked += 1
        assert self.go_on.wait(20)
        return getattr(self._store, name)  # type: ignore[no-any-return]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(os.urandom(2000))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": int(checkpoint.name.split("-")[1])}))


@contextmanager
def watching(tmp_path: Path, more: str = "quiet: 0, unmarked: 0") -> Iterator[tuple[Watching, Watched]]:
    config, store = configured(tmp_path, "worker: {{runs: ['{tmp}/out/*'], " + more + "}}\n")
    watched = Watched(store)
    found = Watching(config, "n0", watched, print)  # type: ignore[arg-type]
    found.begin()
    try:
        yield found, watched
    finally:
        found.close()


def send(found: Watching) -> None:
    """Plan, carry all, and say so."""
    found.send()
    for _ in range(100):
        for lane in found.carrying:
            lane.tick()
        if found._lanes.is_drained:
            break
    found.send()


def look_twice(found: Watching) -> None:
    """What vanishes is sent only if it was seen at rest."""
    found.look()
    until(lambda: False, 0.6)
    found._next = 0
    found.look()


def asks(found: Watching, store: Watched) -> int:
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
    assert {p.place for p in fresh(open_store(store.url)).readable} == {"checkpoint-1", "checkpoint-2"}


def test_what_is_settled_is_sent_at_once_and_what_is_not_when_it_will_be(tmp_path: Path, out: Path) -> None:
    with watching(tmp_path, "quiet: 20s, unmarked: 20s") as (found, _):
        sends: list[float] = []
        found.sending.tick.soon = sends.append
        write(out / "run" / "checkpoint-1")
        found.look()
        assert 19 < sends[0] <= 20
    shutil.rmtree(out / "run")
    with watching(tmp_path) as (found, _):
        found.sending.tick.soon = sends.append
        write(out / "run" / "checkpoint-1")
        found.look()
        assert sends[1:] == [0]


def test_while_a_checkpoint_is_written_one_looks_again_within_half_a_second_and_later_seldom(tmp_path: Path, out: Path) -> None:
    wishes: list[float] = []
    for seconds in (0, 200, 10_000):
        with watching(tmp_path, "scan_every: 30s") as (found, _):
            found.looking.tick.soon = wishes.append
            found._moved = (now := time.monotonic()) - seconds
            found._arrange(now, [Look(due=None), Look(due=100.0)])
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
    awaited = Awaited(store.url)
    found = Watching(config, "n0", awaited, print)
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
    assert [p.place for p in fresh(store).readable] == ["checkpoint-1"]


def test_what_the_configuration_says_of_a_worker_is_what_it_is_told(tmp_path: Path) -> None:
    text = "worker: {{runs: ['{tmp}/out'], order: newest, superseded: drop, send: weights, exclude: ['rng*'], include: ['*'], quiet: 1s, unmarked: 2s"
    config, _ = configured(
        tmp_path, text + ", keep_pins: 3, spool_budget: 1GB, spool_full: 'every:5', clean: verified, keep_local: 4}}\n"
    )
    runs = (RunDir("out", tmp_path / "out"),)
    assert worker_options(config, "n0", runs) == WorkerOptions(
        "n0", runs, 1, 2, 3, 4, "newest", "drop", "weights", ("*",), ("rng*",), 10**9, "every:5", "verified", 4
    )
