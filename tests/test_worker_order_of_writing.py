"""What comes later was begun when the rest was written, and is of the same kind."""

from __future__ import annotations

from pathlib import Path

from ckptsync.scan import Family, Spot
from ckptsync.walk import Stat
from ckptsync.worker.hold import Held, Hold
from ckptsync.worker.looking import Seen
from ckptsync.worker.order_of_writing import is_later, spans_of


def seen(name: str, *mtimes: int, family: Family = "trainer") -> Seen:
    held = {str(n): Held(Stat(str(n), 1, at, n, 0), Path(), is_pinned=False) for n, at in enumerate(mtimes)}
    return Seen("run", Spot(name, family, Path(name)), Hold(name, family, held), None)


def test_a_higher_number_that_was_begun_afterwards_is_later() -> None:
    one, two, over = seen("checkpoint-1", 10, 20), seen("checkpoint-2", 20, 30), seen("checkpoint-3", 15, 30)
    assert is_later(one, spans_of([one, two]))
    assert not is_later(one, spans_of([one, over]))
    assert not is_later(two, spans_of([one, two]))


def test_another_kind_no_step_and_no_files_say_nothing() -> None:
    one = seen("checkpoint-1", 10)
    assert spans_of([seen("checkpoint-2"), seen("final", 30)]) == []
    assert not is_later(one, spans_of([seen("checkpoint_2", 30, family="accelerate")]))
    assert not is_later(seen("final", 1), spans_of([one]))
