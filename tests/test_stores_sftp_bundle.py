"""Work of several threads in bundles: shared by those who wait, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.stores.sftp.bundle import Bundles


class Doing:
    """Notes each bundle; those that have ``held`` in them last until `going` is set."""

    def __init__(self, most: int, at_once: int = 1, held: frozenset[int] = frozenset({0})) -> None:
        self.done: list[list[int]] = []
        self.begun = threading.Semaphore(0)
        self.going = threading.Event()
        self.bundles: Bundles[int] = Bundles(self._do, most, at_once)
        self._held = held

    def _do(self, items: Sequence[int]) -> None:
        self.begun.release()
        if self._held & set(items):
            assert self.going.wait(20)
        self.done.append(sorted(items))
        if -1 in items:
            raise ZeroDivisionError

    def wait_for(self, count: int) -> None:
        """Until so many wait."""
        end = time.monotonic() + 20
        while len(self.bundles._line) < count:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_who_waits_shares_the_next_bundle_of_at_most_so_many() -> None:
    doing = Doing(most=3)
    with ThreadPoolExecutor(8) as pool:
        pool.submit(doing.bundles.join, 0)
        assert doing.begun.acquire(timeout=20)
        for n in range(1, 6):
            pool.submit(doing.bundles.join, n)
            doing.wait_for(n)
        doing.going.set()
    assert doing.done == [[0], [1, 2, 3], [4, 5]]


def test_a_full_bundle_begins_beside_another_but_no_more_of_them_than_allowed() -> None:
    doing = Doing(most=2, at_once=2, held=frozenset({0, 1}))
    with ThreadPoolExecutor(8) as pool:
        pool.submit(doing.bundles.join, 0)
        assert doing.begun.acquire(timeout=20)
        for n in (1, 2):
            pool.submit(doing.bundles.join, n)
        assert doing.begun.acquire(timeout=20), "the first is still being done"
        for n in (3, 4):
            pool.submit(doing.bundles.join, n)
        doing.wait_for(2)
        doing.going.set()
    assert sorted(doing.done) == [[0], [1, 2], [3, 4]]


def test_an_error_is_raised_once_and_the_others_return_and_go_on() -> None:
    doing = Doing(most=9)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(doing.bundles.join, 0)]
        assert doing.begun.acquire(timeout=20)
        for n in (-1, 1, 2):
            results.append(pool.submit(doing.bundles.join, n))
            doing.wait_for(len(results) - 1)
        doing.going.set()
    assert [type(r.exception()) for r in results] == [type(None), ZeroDivisionError, type(None), type(None)]
    doing.bundles.join(5)
    assert doing.done == [[0], [-1, 1, 2], [5]]


def test_many_threads_have_each_item_done_exactly_once() -> None:
    doing = Doing(most=4, at_once=3, held=frozenset())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(doing.bundles.join, range(500)))
    assert sorted(n for items in doing.done for n in items) == list(range(500))
    assert max(map(len, doing.done)) <= 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_for_none_of_its_parents_threads() -> None:
    doing = Doing(most=9)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(doing.bundles.join, 0)
        assert doing.begun.acquire(timeout=20)
        child = os.fork()
        if not child:
            try:
                doing.bundles.join(7)
            finally:
                os._exit(doing.done != [[7]])
        status = os.waitpid(child, 0)[1]
        doing.going.set()
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_is_done_is_let_go_of_at_once() -> None:
    """Contents of files are items: rings of them would stay in memory until somebody looks for rings."""

    class Item:
        pass

    items: list[weakref.ref[Item]] = []
    begun, going = threading.Semaphore(0), threading.Event()

    def do(_: Sequence[Item]) -> None:
        begun.release()
        assert going.wait(20)

    bundles: Bundles[Item] = Bundles(do, 2, 1)

    def join() -> None:
        item = Item()
        items.append(weakref.ref(item))
        bundles.join(item)

    gc.disable()
    try:
        threads = [threading.Thread(target=join) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=20)
        end = time.monotonic() + 20
        while len(bundles._line) < 5:
            assert time.monotonic() < end
            time.sleep(0.001)
        going.set()
        for thread in threads:
            thread.join()
        assert [item() for item in items] == [None] * 6
    finally:
        gc.enable()
