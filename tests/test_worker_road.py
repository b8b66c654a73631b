from __future__ import annotations

from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.road import Road


def test_who_says_nothing_else_is_alone_and_has_the_usual_limits() -> None:
    road = Road(MemoryStore(), "n0", lambda: ())
    assert (road.is_contended(), road.threads) == (False, Limits().threads)
    road.passed(1)
