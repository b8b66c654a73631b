"""What tombstones, keeps and joins say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.records.save_decisions import (
    Fate,
    Keep,
    Scope,
    Stage,
    Tombstone,
    fate,
    keep_reason,
    tombstones_in_force,
)


def stone(n: int, stage: Stage = "marked", scope: Scope = "location", of: str = "m") -> Tombstone:
    return Tombstone("run", "c", "c", n, (of,), f"{scope} {n}", scope, stage)


def told(*stones: Tombstone, manifests: tuple[str, ...] = ("m",)) -> Fate:
    return fate({f"t{i}": s for i, s in enumerate(stones)}, manifests)


def test_a_tombstone_speaks_of_the_save_whose_manifest_it_names() -> None:
    assert told(stone(0)).retired == "location 0"
    assert told(stone(0), manifests=("m", "later")).retired
    assert told(stone(0), manifests=("another",)) == Fate()
    assert told(stone(0, scope="shards")) == Fate(shards="shards 0", stones=("t0",))


def test_what_was_taken_back_is_alive_and_what_was_said_again_is_not() -> None:
    assert told(stone(0), stone(1, "withdrawn")) == Fate()
    assert told(stone(0), stone(1, "withdrawn"), stone(2)).retired == "location 2"
    assert told(stone(0, scope="shards"), stone(1, "withdrawn", "shards")) == Fate()
    assert told(stone(0, scope="shards"), stone(1), stone(2, "withdrawn")).shards, (
        "what is taken back is the end of the location"
    )


def test_nothing_is_taken_back_at_the_moment_when_it_begins() -> None:
    """Two heads write number 1 at once: who began deletes, so who took back was too late, and
    everybody reads it so.
    """
    found = told(stone(0), stone(1, "withdrawn"), stone(1, "begun"))
    assert found.retired
    assert found.is_begun


def test_a_later_save_in_the_same_location_takes_back_nothing_of_the_earlier_one() -> None:
    stones = {"a": stone(0, of="gone"), "b": stone(1), "c": stone(2, "withdrawn")}
    assert list(tombstones_in_force(stones)) == ["a"]


def test_the_end_of_a_location_goes_before_that_of_its_shards() -> None:
    shards = (stone(0, scope="shards"), stone(1, "begun", "shards"), stone(2, "done", "shards"))
    assert told(*shards).is_done
    both = told(*shards, stone(3))
    assert (both.retired, both.is_begun, both.is_done) == ("location 3", False, False)
    assert both.shards


STONES = st.lists(
    st.builds(
        stone,
        st.integers(0, 3),
        st.sampled_from(["marked", "begun", "withdrawn"]),
        st.sampled_from(["location", "shards"]),
    ),
    max_size=5,
)


@given(STONES)
def test_the_order_in_which_they_are_read_does_not_matter(stones: list[Tombstone]) -> None:
    names = {f"t{i}": s for i, s in enumerate(stones)}
    shuffled = dict(sorted(names.items(), reverse=True))
    assert fate(names, {"m"}) == fate(shuffled, {"m"})


def said(n: int, *, keeps: bool, reason: str = "") -> Keep:
    return Keep("run", "c-1", "c-1", n, keeps, reason)


def test_the_highest_number_counts() -> None:
    assert keep_reason({}) == ""
    assert keep_reason({"a": said(0, keeps=True, reason="for the paper")}) == "for the paper"
    assert keep_reason({"a": said(0, keeps=True), "b": said(1, keeps=False)}) == ""
    assert keep_reason({"a": said(2, keeps=True), "b": said(1, keeps=False)}) == "kept by hand"


def test_of_two_at_once_the_one_that_keeps_counts() -> None:
    assert keep_reason({"a": said(1, keeps=True), "z": said(1, keeps=False)}) == "kept by hand"
