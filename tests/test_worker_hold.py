"""Where a checkpoint's files are read from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.scan import found, spots
from ckptsync.spool.links import grow
from ckptsync.spool.pins import open_pin, pins
from ckptsync.walk import look, walk
from ckptsync.worker.hold import LATER, Hold, each_open, hold


def held(tmp_path: Path) -> Hold:
    (tmp_path / "checkpoint-4").mkdir()
    for name in ("a", "b"):
        (tmp_path / "checkpoint-4" / name).write_text(name * 3)
    pin = open_pin(tmp_path, "checkpoint-4", 0, "n0")
    assert pin is not None
    grow(pin, tmp_path / "checkpoint-4", ["a"])
    (spot,) = spots(tmp_path)
    return hold(found(spot), pins(tmp_path)[0], spot.family, spot.name)


def opened() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_pinned_is_read_from_the_pin_and_the_rest_is_known_to_be_in_danger(tmp_path: Path) -> None:
    both = held(tmp_path)
    assert (both.unpinned, both.gone, dict(both.sizes())) == (("b",), False, {"a": 3, "b": 3})
    shutil.rmtree(tmp_path / "checkpoint-4")
    out = bytearray(2)
    both.read_into("a", 1, memoryview(out))
    assert out == b"aa"
    with pytest.raises(Incomplete):
        both.read_into("b", 0, memoryview(out))
    assert hold(None, pins(tmp_path)[0], "trainer", "checkpoint-4").gone


def test_reading_past_the_end_or_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    both = held(tmp_path)
    with pytest.raises(Corrupt, match="ends at byte 3"):
        both.read_into("a", 2, memoryview(bytearray(2)))
    with pytest.raises(Incomplete, match="not in"):
        both.read_into("c", 0, memoryview(bytearray(1)))


def test_each_is_opened_where_it_is_and_closed_before_the_next(tmp_path: Path) -> None:
    both = held(tmp_path)
    (tmp_path / "checkpoint-4" / "sub").mkdir()
    (tmp_path / "checkpoint-4" / "sub" / "c").write_text("c")
    (spot,) = spots(tmp_path)
    files = [*both.held.values(), *hold(found(spot), None, spot.family, spot.name).held.values()]
    descriptors = opened()
    seen = [(look(fd, one.stat.path), opened()) for one, fd in each_open(files)]
    assert [stat for stat, _ in seen] == [one.stat for one in files]
    assert {stat.path.count("/"): more - descriptors for stat, more in seen} == {0: 2, 1: 3}
    assert opened() == descriptors


def test_who_opens_each_is_told_which_one_is_gone(tmp_path: Path) -> None:
    both = held(tmp_path)
    (tmp_path / "checkpoint-4" / "b").unlink()
    with pytest.raises(Incomplete, match="checkpoint-4/b: gone") as caught:
        list(each_open(both.held.values()))
    assert caught.value.hint == LATER
    shutil.rmtree(tmp_path)
    with pytest.raises(Incomplete, match="a: gone"):
        list(each_open(both.held.values()))


def test_what_is_not_sent_still_tells_what_the_checkpoint_is(tmp_path: Path) -> None:
    both = held(tmp_path)
    part = both.only({"b"})
    assert [s.path for s in part.stats] == ["b"]
    assert part.sizes() == both.sizes()
    out = bytearray(both.sizes()["a"])
    part.read_into("a", 0, memoryview(out))
    assert any(out)


def test_what_was_added_takes_no_name_that_the_trainer_has_used(tmp_path: Path) -> None:
    both = held(tmp_path)
    (tmp_path / "added").mkdir()
    for name in ("a", "config.json"):
        (tmp_path / "added" / name).write_text("added")
    more = both.with_added(tmp_path / "added", walk(tmp_path / "added").files)
    assert more.held.keys() == both.held.keys() | {"config.json"}
    assert more.held["a"] == both.held["a"]
    assert more.held["config.json"].is_added
