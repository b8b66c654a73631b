"""One save for all nodes, whatever each of them could begin with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.catalogue.location_summary import Summary
from ckptsync.errors import ConfigError
from ckptsync.records.location_status import Status
from ckptsync.resume.choose import (
    MOST,
    Candidate,
    NodeRecord,
    WholeSave,
    check_nodes,
    choose,
    find_unresumable,
    list_candidates,
    save_id,
    why_chosen,
)


def stored(step: int, status: Status = "VERIFIED", location: str = "", **more: object) -> Summary:
    name = f"checkpoint-{step}"
    plain = Summary(
        "run", name, location or name, step, status, manifests=(f"m{step}",), resume=True
    )
    return replace(plain, ended=float(step), first_arrival=float(step), **more)  # type: ignore[arg-type]


def record(node: str, *ids: str, nnodes: int = 2) -> NodeRecord:
    return NodeRecord(node, nnodes, tuple(Candidate(one.split("@")[0], one) for one in ids))


def chosen(*records: NodeRecord) -> str:
    choice = choose({one.node: one for one in records})
    assert choice == choose({one.node: one for one in reversed(records)})
    return choice.id if choice else ""


A, B, B2, C = "checkpoint-1@a", "checkpoint-2@b", "checkpoint-2@other", "checkpoint-3@c"


@pytest.mark.parametrize(
    ("first", "second", "choice"),
    [
        ([A, B, C], [A, B, C], C),
        ([A, B, C], [A, B], B),  # it came before the third was VERIFIED
        ([A, B], [A, B2], A),  # two saves of one step are never mixed
        ([A, B, B2], [A, B2, B], B2),  # the first node's order counts
        ([A], [B], ""),
        ([], [A], ""),
    ],
)
def test_the_newest_common_save_is_chosen(first: list[str], second: list[str], choice: str) -> None:
    assert chosen(record("n0", *first), record("n1", *second)) == choice


def test_newer_saves_that_not_all_nodes_have_are_named() -> None:
    records = {"n0": record("n0", A, B, C), "n1": record("n1", A, B)}
    assert why_chosen(records, choose(records)) == (
        "checkpoint-3 is newer, but only n0 could begin with it"
    )
    other = {"n0": record("n0", A, B), "n1": record("n1", A, B2)}
    assert why_chosen(other, choose(other)) == (
        "checkpoint-2 is newer, but the nodes do not have the same save of it"
    )
    assert why_chosen({"n0": record("n0", A)}, Candidate("checkpoint-1", A)) == ""


def test_only_what_is_verified_and_can_be_resumed_is_a_candidate() -> None:
    run = [
        stored(1),
        stored(2, "COMPLETE"),
        stored(3, resume=False),
        stored(4, shards_retired="old"),
        stored(5, "INCOMPLETE"),
        stored(6, "DAMAGED"),
    ]
    names = [one.checkpoint for one in list_candidates(run, [], is_verified=True)]
    assert names == ["checkpoint-1"]
    names = [one.checkpoint for one in list_candidates(run, [], is_verified=False)]
    assert names == ["checkpoint-1", "checkpoint-2"]


def test_a_newest_checkpoint_that_lacks_what_resuming_needs_is_named_with_it() -> None:
    lacking = stored(3, "COMPLETE", resume=False, lacks=("rng_state_2.pth: not uploaded",))
    said = "checkpoint-3 is complete, but not for resuming: rng_state_2.pth: not uploaded"
    assert find_unresumable([stored(2), lacking]) == said
    assert not find_unresumable([lacking, stored(4), stored(5, "INCOMPLETE", resume=False)])
    assert not find_unresumable([])


def test_what_is_whole_in_the_output_directory_is_ordered_among_what_is_stored() -> None:
    run = [stored(1), stored(3), stored(2)]
    local = [WholeSave("checkpoint-4", "local-4", 4.0), WholeSave("final", "local-f", 9.0)]
    found = list_candidates(run, local, is_verified=True)
    assert [one.step for one in found] == [1, 2, 3, 4]
    assert [bool(one.location) for one in found] == [True, True, True, False]
    many = list_candidates([stored(n) for n in range(1, MOST + 3)], [], is_verified=True)
    assert (many[0].step, many[-1].step) == (3, MOST + 2)


def test_a_location_with_other_manifests_is_another_save() -> None:
    assert save_id("checkpoint-1", ["a", "b"]) == save_id("checkpoint-1", ["b", "a"])
    assert len({save_id("checkpoint-1", ["a"]), save_id("checkpoint-1", ["a", "b"])}) == 2
    assert save_id("checkpoint-1", ["a"]) != save_id("checkpoint-1~0", ["a"])


def test_nodes_that_contradict_each_other_are_named() -> None:
    both = {"n0": record("n0", nnodes=2), "n1": record("n1", nnodes=3)}
    with pytest.raises(ConfigError, match="n0 expects 2; n1 expects 3"):
        check_nodes(both, 2)
    three = {name: record(name, nnodes=2) for name in ("n0", "n1", "n2")}
    with pytest.raises(ConfigError, match="3 nodes take part in an attempt of 2: n0, n1, n2"):
        check_nodes(three, 2)
    check_nodes({"n0": record("n0", nnodes=2)}, 2)
