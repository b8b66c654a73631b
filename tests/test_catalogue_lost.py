from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ckptsync.catalogue.lost import explained, numbers, ranges
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Summary
from ckptsync.model import Demands
from ckptsync.records.manifest import Manifest
from ckptsync.stores.memory import MemoryStore
from tests.filled import DEMO, FIRST, entry, put, send, two_nodes

LOST = "global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt"


def seen(store: MemoryStore, location: str) -> Summary:
    return next(s for s in read(store).summaries if s.location == location)


def arriving(
    store: MemoryStore, node: str, ranks: Sequence[int], location: str, world: int | None = None, *, whole: bool = True
) -> None:
    """A node that had these ranks sends a file of each; ``whole``: what it sends says which files there are in all."""
    paths = [f"__{rank}_0.distcp" for rank in ranks]
    demands = Demands({f"__{rank}_0.distcp": None for rank in range(world or 0)} if whole else {}, {}, world)
    for path in paths:
        store.write(f"run/{location}/{path}", [b"x"])
    files = tuple(entry(path, b"x", FIRST) for path in sorted(paths))
    put(store, Manifest("run", location, location, node, 0, files, tuple(ranks), FIRST, FIRST, demands, save=location))


def test_what_a_dead_node_had_is_named_with_the_node_that_had_its_ranks_before() -> None:
    store = MemoryStore()
    two_nodes(store, "zero3", "checkpoint-3")
    send(store, DEMO / "zero3/node0/checkpoint-4", "node0", "checkpoint-4")
    found = seen(store, "checkpoint-4")
    assert found.status == "ARRIVING"
    assert found.lost == (f"node1, which had rank 1 in checkpoint-3: {LOST} and 2 more, which no node has sent",)
    assert found.awaited == ("node1",)


def test_it_keeps_nobody_from_being_whole() -> None:
    store = MemoryStore()
    send(store, DEMO / "zero3/node0/checkpoint-4", "node0", "checkpoint-4")
    two_nodes(store, "zero3", "checkpoint-5")
    assert [(s.location, s.status) for s in read(store).summaries] == [("checkpoint-4", "ARRIVING"), ("checkpoint-5", "COMPLETE")]


def test_without_another_checkpoint_the_rank_is_named_and_nobody_blamed() -> None:
    store = MemoryStore()
    send(store, DEMO / "zero3/node0/checkpoint-4", "node0", "checkpoint-4")
    found = seen(store, "checkpoint-4")
    assert (found.lost, found.awaited) == ((f"rank 1: {LOST} and 2 more, which no node has sent",), ())


def test_the_checkpoint_nearest_in_time_tells_whose_ranks_they_are() -> None:
    store = MemoryStore()
    arriving(store, "old", [0, 1, 2, 3], "checkpoint-8", 4)  # it came first, whatever its name
    for location in ("checkpoint-2", "checkpoint-3"):
        arriving(store, "a", [0, 1], location, 4)
        if location == "checkpoint-2":
            arriving(store, "b", [2, 3], location, 4)
    found = seen(store, "checkpoint-3")
    assert found.lost == ("b, which had ranks 2-3 in checkpoint-2: __2_0.distcp and 1 more, which no node has sent",)


def test_a_hooks_world_tells_of_ranks_of_which_nothing_came() -> None:
    store = MemoryStore()
    arriving(store, "a", [0, 1], "checkpoint-1", 4, whole=False)
    assert seen(store, "checkpoint-1").lost == ("ranks 2-3: nothing of it has come",)


def test_where_no_metadata_came_those_who_took_part_before_are_awaited() -> None:
    store = MemoryStore()
    arriving(store, "a", [0], "checkpoint-1", 2)
    arriving(store, "b", [1], "checkpoint-1", 2)
    arriving(store, "b", [1], "checkpoint-2", whole=False)
    found = seen(store, "checkpoint-2")
    assert (found.lost, found.awaited) == (("a: has sent nothing of it; it had a part of checkpoint-1",), ("a",))


def test_what_was_sent_and_is_not_in_the_store_is_asked_of_its_node() -> None:
    store = MemoryStore()
    two_nodes(store, "zero3", "checkpoint-4")
    store.delete(f"run/checkpoint-4/{LOST}")
    found = seen(store, "checkpoint-4")
    assert (found.lost, found.awaited) == ((f"node1: has sent {LOST}, not in the store now",), ("node1",))


def test_what_is_not_arriving_lacks_nobody() -> None:
    store = MemoryStore()
    two_nodes(store)
    whole = seen(store, "checkpoint-4")
    assert explained([whole]) == (whole,)
    assert (whole.gaps, whole.lost, whole.ranks) == ((), (), (("node0", "0"), ("node1", "1")))
    assert explained([replace(whole, status="ARRIVING")])[0].lost == ()


@pytest.mark.parametrize(("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 7], "0-2,7"), ([9, 8, 1], "1,8-9")])
def test_ranks_are_written_as_ranges_and_read_again(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text
    assert numbers(text) == set(ranks)
