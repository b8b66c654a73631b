"""Who gives way when the spool is full: what the store has, then what the operator's rule says, aloud."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.spool.marks import Took
from ckptsync.spool.pins import Pin
from ckptsync.walk import Stat
from ckptsync.worker.budget import PinCost, Room, SpoolRule, alone, give_up, held


def cost(
    step: int, size: int = 10, *, gone: bool = True, stored: bool = False, verified: bool = False, sending: int = 0
) -> PinCost:
    pin = Pin(f"checkpoint-{step}", 0, "n0", 0, Path(str(step)), took=Took(sending=sending), stored=stored)
    return PinCost(pin, size, gone, verified, step)


def given(pins: list[PinCost], lacking: int, full: str = "oldest") -> list[int]:
    relief = give_up(pins, Room(100 + lacking, 1000, 10), SpoolRule(100, full))
    return [int(p.checkpoint.removeprefix("checkpoint-")) for p in relief.drop]


def test_nothing_goes_while_there_is_room() -> None:
    four = [cost(n, stored=True) for n in (1, 2, 3, 4)]
    assert given(four, 0) == []
    assert give_up(four, Room(10**9, 10, 10), SpoolRule()).drop == ()


def test_what_the_store_has_goes_first_and_the_verified_before_the_rest() -> None:
    pins = [cost(1), cost(2, stored=True), cost(3, stored=True, verified=True), cost(4)]
    assert given(pins, 1) == [3]
    assert given(pins, 11) == [3, 2]
    assert given(pins, 21) == [3, 2, 1]


def test_the_oldest_goes_but_neither_the_newest_nor_the_one_that_is_on_its_way() -> None:
    pins = [cost(1, sending=7), cost(2, sending=8), cost(3), cost(4)]
    assert given(pins, 1) == [2]
    assert given(pins, 99) == [2, 3]


def test_each_nth_stays_as_long_as_that_is_enough() -> None:
    pins = [cost(500 * n) for n in (1, 2, 3, 4, 5, 6)]
    assert given(pins, 25, "every:2") == [500, 1500, 2500]
    assert given(pins, 45, "every:2") == [500, 1500, 2500, 1000, 2000]
    assert given(pins, 25, "every:3") == [500, 1000, 2000]


def test_who_waits_gives_up_nothing_that_the_store_has_not_and_hears_that_it_is_full() -> None:
    relief = give_up([cost(1, stored=True), cost(2), cost(3)], Room(125, 1000, 10), SpoolRule(100, "wait"))
    assert [p.checkpoint for p in relief.drop] == ["checkpoint-1"]
    assert relief.is_full
    assert "nothing new is pinned until something is stored" in relief.standing[0]


def test_what_the_trainer_still_has_takes_no_room_and_makes_none() -> None:
    assert given([cost(1, gone=False), cost(2, size=0), cost(3), cost(4)], 5) == [3]


def test_where_the_disk_is_full_of_something_else_nothing_is_given_up_in_vain() -> None:
    pins = [cost(1, stored=True), cost(2), cost(3)]
    relief = give_up(pins, Room(30, 0, 21), SpoolRule())
    assert [p.checkpoint for p in relief.drop] == ["checkpoint-1"]
    assert (relief.is_full, relief.words) == (True, ())
    assert [p.checkpoint for p in give_up(pins, Room(30, 0, 20), SpoolRule()).drop] == ["checkpoint-1", "checkpoint-2"]
    assert [p.checkpoint for p in give_up(pins, Room(30, 0, 21), SpoolRule(15)).drop] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("room", "why"), [(Room(130, 10, 10), "spool full: 0.0 MiB held"), (Room(100, 0, 10), "disk full: 0.0 MiB free")]
)
def test_what_is_given_up_is_said_with_the_reason(room: Room, why: str) -> None:
    relief = give_up([cost(n, 2**20 * 3) for n in (1, 2, 3)], room, SpoolRule(100))
    assert relief.words[0].startswith("checkpoint-1: given up before it was stored, for 3.0 MiB (")
    assert why in relief.words[0]
    assert "spool_full: oldest" in relief.words[0]


def test_bytes_are_held_by_pins_where_nobody_else_has_a_name_and_counted_once() -> None:
    file = Stat("a", 5, 1, inode=1, device=0, links=1)
    ours = Pin("checkpoint-4", 0, "n0", 0, Path("x"), (file, replace(file, path="b", inode=2, links=2)))
    twice = Pin("checkpoint-4", 1, "n0", 0, Path("y"), (replace(file, inode=2, links=2),))
    assert (held([ours]), alone(ours)) == (5, 5)
    assert (held([ours, twice]), alone(ours), alone(twice)) == (10, 5, 0)
    assert held([replace(ours, files=(replace(file, links=2), replace(file, path="b", links=2)))]) == 5


def test_the_rule_that_an_operator_writes() -> None:
    assert [SpoolRule(full=word).every for word in ("oldest", "wait", "every:4")] == [0, 0, 4]
