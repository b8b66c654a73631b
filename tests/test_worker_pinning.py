"""How pins follow their source: two saves never meet in one pin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.scan import Found
from ckptsync.spool.marks import Commit
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat
from ckptsync.worker.pinning import Drop, Grow, Open, Trim, follow, spare


def files(told: dict[str, int]) -> tuple[Stat, ...]:
    """A name and its inode; another inode is another time, too."""
    return tuple(Stat(n, 1, inode, inode, 0) for n, inode in told.items())


def found(**told: int) -> Found:
    return Found("checkpoint-4", "trainer", Path("x"), files(told), (), ())


def pin(k: int, node: str = "n0", **told: int) -> Pin:
    return Pin("checkpoint-4", k, node, 0, Path(str(k)), files(told))


def test_what_is_seen_first_is_pinned_and_grows() -> None:
    assert follow(found(a=1), [], "n0", ()) == (Open(0),)
    assert follow(found(a=1), [pin(0)], "n0", ()) == (Grow(pin(0), ("a",)),)
    assert follow(found(a=1, b=2), [pin(0, a=1)], "n0", ()) == (Grow(pin(0, a=1), ("b",)),)
    assert follow(found(a=1), [pin(0, a=1)], "n0", ()) == ()


def test_rotation_takes_nothing_from_a_pin() -> None:
    ours = pin(0, a=1, b=2)
    assert follow(found(a=1), [ours], "n0", ()) == ()
    assert follow(found(), [ours], "n0", ()) == ()
    assert follow(None, [ours], "n0", ()) == ()


def test_a_placeholder_that_the_trainer_took_back_is_let_go() -> None:
    ours = pin(0, config=1, model=2)
    assert follow(found(config=1, shard=3), [ours], "n0", ()) == (Trim(ours, ("model",)), Grow(ours, ("shard",)))


def test_a_directory_made_again_is_another_pin_even_if_it_begins_with_a_new_name() -> None:
    ours = pin(0, a=1, b=2)
    assert follow(found(rng=9), [ours], "n0", ()) == (Open(1),)
    assert follow(found(a=8, b=9), [ours], "n0", ()) == (Open(1),)


def test_a_save_written_over_a_taken_one_is_another_pin_and_the_taken_one_stays() -> None:
    ours = pin(0, a=1, b=2)
    assert follow(found(a=1, b=9), [ours], "n0", (0,)) == (Open(1),)
    assert follow(found(a=1, b=9), [ours], "n0", ()) == (Open(1), Drop(ours))


def test_only_the_newest_pin_follows_and_another_nodes_is_let_be() -> None:
    assert follow(found(a=9), [pin(0, a=1), pin(1, a=9)], "n0", ()) == ()
    assert follow(found(a=9), [pin(0, "n1", a=1)], "n0", ()) == ()


def commit(k: int, **told: int) -> Pin:
    """A pin that the hook committed."""
    word = Commit("t", "s", "checkpoint-4", 4, 1, (0,), "h", "hf", 0.0, {f.path: (f.size, f.mtime) for f in files(told)})
    return replace(pin(k, "n0", **told), commit=word)


def test_what_the_hook_committed_neither_grows_nor_shrinks() -> None:
    assert follow(found(a=1, b=2), [commit(0, a=1, b=2)], "n0", ()) == ()
    assert follow(found(a=1), [commit(0, a=1, b=2)], "n0", ()) == ()
    assert follow(found(a=1, b=2, c=3), [commit(0, a=1, b=2)], "n0", ()) == (Open(1),)
    assert follow(found(a=1, b=9), [commit(0, a=1, b=2)], "n0", ()) == (Open(1),)
    assert follow(found(b=9), [commit(0, a=1, b=2)], "n0", ()) == (Open(1),)


@pytest.mark.parametrize("told", [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 7}, {"a": 1, "placeholder": 7}], ids=str)
def test_what_was_pinned_of_a_save_before_the_hook_committed_it_goes(told: dict[str, int]) -> None:
    ours = pin(0, "n0", **told)
    for source in (found(a=1, b=2), found(), None):
        assert follow(source, [ours, commit(1, a=1, b=2)], "n0", ()) == (Drop(ours),)
    assert follow(found(a=1, b=2), [replace(ours, node="n1"), commit(1, a=1, b=2)], "n0", ()) == ()


def test_an_earlier_save_stays_beside_the_one_that_the_hook_committed() -> None:
    elsewhere, taken, committed = pin(0, a=5, b=6), pin(0, a=1, b=7), commit(0, a=1, b=7)
    assert follow(found(a=1, b=2), [elsewhere, commit(1, a=1, b=2)], "n0", ()) == ()
    assert follow(found(a=1, b=2), [taken, commit(1, a=1, b=2)], "n0", (0,)) == ()
    assert follow(found(a=1, b=2), [committed, commit(1, a=1, b=2)], "n0", ()) == ()


def test_a_void_commit_is_a_pin_like_any_other() -> None:
    void = replace(commit(0, a=1, b=2), files=files({"a": 1, "b": 3}))
    assert follow(found(a=1, b=3, c=4), [void], "n0", ()) == (Grow(void, ("c",)),)
    assert follow(found(a=1, b=9), [void], "n0", ()) == (Open(1), Drop(void))


def test_the_newest_proven_pins_are_kept() -> None:
    three = [pin(0), pin(1), pin(2)]
    assert spare(three, 2) == (three[0],)
    assert spare(three, 0) == tuple(three)
    assert spare(three, 9) == ()
