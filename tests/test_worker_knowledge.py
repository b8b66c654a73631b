"""What is known of the store without asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.saving import Memory, save
from ckptsync.worker.selecting import EVERYTHING, Selection
from ckptsync.worker.store_view import StoreView
from tests.test_worker_push import ONE, lay
from tests.test_worker_saving import desk, seen
from tests.test_worker_tick import verify


class Counting(MemoryStore):
    """Counts listings."""

    listed = 0

    def names(self, prefix: str) -> Iterator[Entry]:
        self.listed += 1
        return iter(super().names(prefix))


def test_what_was_read_last_is_known_until_the_next_reading(tmp_path: Path) -> None:
    store = Counting()
    lay(tmp_path, ONE)
    one = seen(tmp_path)
    save(one, desk(store, Memory()))
    view = StoreView(store, "n0", EVERYTHING, lambda: 0)
    before = store.listed
    assert not view.is_done(one)
    assert not view.is_done(one)
    assert store.listed == before
    view.refresh("run")
    assert view.is_done(one)
    assert view.is_done(one)
    assert not view.is_proven("run", "checkpoint-4", one.hold.stats)
    assert store.listed == before + 1


class Overtaken(MemoryStore):
    """While it is listed for the first time, something else happens."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def names(self, prefix: str) -> Iterator[Entry]:
        found, meanwhile = list(super().names(prefix)), self.meanwhile
        self.meanwhile = lambda: None
        meanwhile()
        return iter(found)


def test_a_reading_that_began_earlier_and_ended_later_is_no_news_and_is_what_its_reader_gets(tmp_path: Path) -> None:
    store = Overtaken()
    lay(tmp_path, ONE)
    one = seen(tmp_path)
    view = StoreView(store, "n0", EVERYTHING, lambda: 0)

    def meanwhile() -> None:
        save(one, desk(store, Memory()))
        view.refresh("run")

    store.meanwhile = meanwhile
    assert not view.refresh("run").records
    assert view.is_done(one)


def test_what_a_report_proves_needs_no_pin_any_more(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    one = seen(tmp_path)
    save(one, desk(store, Memory()))
    verify(store)
    view = StoreView(store, "n0", EVERYTHING, lambda: 0)
    view.refresh("run")
    assert view.is_proven("run", "checkpoint-4", one.hold.stats)


def test_what_is_left_out_by_choice_is_no_part_of_what_has_to_be_stored(tmp_path: Path) -> None:
    store, chosen = MemoryStore(), Selection(exclude=("x",))
    lay(tmp_path, ONE)
    one = seen(tmp_path)
    save(one, replace(desk(store, Memory()), selection=chosen))
    everything, part = (StoreView(store, "n0", selection, lambda: 0) for selection in (EVERYTHING, chosen))
    for view in (everything, part):
        view.refresh("run")
    assert part.is_done(one)
    assert not everything.is_done(one)


def test_a_save_that_this_node_said_it_was_sending_is_begun(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    view = StoreView(store, "n0", EVERYTHING, lambda: 0)
    assert not view.is_begun(seen(tmp_path))
    store.write("run/.ckptsync/checkpoint-4/sending/n0", [b"sending\n"])
    view.refresh("run")
    assert view.is_begun(seen(tmp_path))
