"""Errands of a role: as many at once as are allowed, tried again when it is time, told as they are."""

from __future__ import annotations

import sys
import threading

from ckptsync.config.loading import read
from ckptsync.daemon.children import Children
from ckptsync.daemon.errands import Errands, Task, bounds
from ckptsync.daemon.orders import Order
from tests.ticks import until

CONFIG = read("roles: [head]\nstore: {url: /nowhere}\n", "c", {})
FAILS = 'print(\'{"type":"failed","text":"odd","hint":"look"}\')'
FINDS = 'print(\'{"type":"done","errors":["a: damaged"],"changed":true}\')'
HANGS = "import time; time.sleep(600)"


def task(location: str, key: str = "k") -> Task:
    return Task(Order("verify", "run", location), key)


def errands(script: str, most: int = 1) -> tuple[Errands, Children, threading.Event]:
    children, ended = Children(CONFIG, [sys.executable, "-c", script]), threading.Event()
    its = Errands(children, CONFIG, most)
    its.hint = ended.set
    return its, children, ended


def test_the_first_ones_begin_and_the_others_are_in_the_queue() -> None:
    its, children, _ = errands(HANGS, most=2)
    for _ in "look", "look again":
        assert set(its.begin(map(task, "abc"))) == {"run/a", "run/b", "run/c"}
        assert sorted(job.subject for job in children.jobs()) == ["run/a", "run/b"]
    children.end()
    assert until(lambda: not children.jobs(), 30)


def test_what_failed_is_told_until_it_is_no_errand_any_more_and_gives_way_to_others() -> None:
    its, _, ended = errands(FAILS)
    its.begin([task("a"), task("b")])
    assert ended.wait(60)
    assert its.errors() == ("run/a: odd",)
    assert its.lines()[0].text == "phase=failed subject=run/a error=odd hint=look"
    assert its.begin([task("a")]) == ()
    ended.clear()
    assert its.begin([task("a"), task("b")]) == ("run/b",)
    assert ended.wait(60)
    assert its.begin([]) == ()
    assert its.errors() == ()


def test_what_is_found_is_told_until_it_is_looked_at_again() -> None:
    its, _, ended = errands(FINDS)
    its.begin([task("a")])
    assert ended.wait(60)
    its.begin([])
    assert its.errors() == ("a: damaged",)


def test_a_change_brings_it_back_at_once() -> None:
    its, children, ended = errands(FAILS)
    its.begin([task("a")])
    assert ended.wait(60)
    assert its.begin([task("a", "other")]) == ("run/a",)
    assert until(lambda: not children.jobs(), 30)


def test_bounds_leave_room_for_a_slow_network_and_a_small_bandwidth() -> None:
    wide, narrow = (
        read(f"roles: [head]\nstore: {{url: /x}}\n{more}", "c", {}) for more in ("", "limits: {bandwidth: 100KB/s, stall: 3m}\n")
    )
    order = Order("consolidate", "run", "p", 10**9)
    assert bounds(wide, order).deadline > 1000 + bounds(wide, Order("consolidate", "run", "p")).deadline
    assert bounds(narrow, order).deadline > 10_000
    assert (bounds(wide, order).stall, bounds(narrow, order).stall) == (120, 240), "limits.stall and a wait before the next try"
