"""Which save goes first, and which not at all."""

from __future__ import annotations

import pytest

from ckptsync.worker.options import Order
from ckptsync.worker.queue import Turn, ordered


def turn(name: str, at: int, *, run: str = "run", written: int = -1, is_begun: bool = False) -> Turn[str]:
    return Turn(name, run, (float(at), at, 0), at if written < 0 else written, is_begun)


@pytest.mark.parametrize(("order", "first"), [("oldest", ("a", "b", "c")), ("newest", ("c", "b", "a"))])
def test_saves_go_in_the_operators_order(order: Order, first: tuple[str, ...]) -> None:
    assert ordered([turn("b", 2), turn("a", 1), turn("c", 3)], order, "keep").first == first


def test_what_is_begun_goes_before_all_that_is_not() -> None:
    assert ordered([turn("a", 1), turn("b", 2, is_begun=True), turn("c", 3)], "newest", "keep").first == ("b", "c", "a")


def test_what_a_newer_save_of_its_run_has_overtaken_is_dropped_but_not_what_is_begun() -> None:
    found = ordered([turn("a", 1), turn("b", 2, is_begun=True), turn("c", 3), turn("d", 1, run="other")], "oldest", "drop")
    assert (found.first, found.dropped) == (("b", "d", "c"), ("a",))


def test_a_clock_that_was_set_back_makes_nobody_old() -> None:
    found = ordered([turn("before", 1, written=9000), turn("after", 2, written=5000)], "oldest", "drop")
    assert (found.first, found.dropped) == (("before", "after"), ())
