"""A checkpoint gets from the nodes that wrote it into the store, whole, once, and as one save."""

from __future__ import annotations

import shutil
import time
from typing import Any, TypeVar

import pytest

from tests.scenarios.world import World, dated, files_below, reference
from tests.support.exhaustive import in_exhaustive

Row = TypeVar("Row")
TWO_NODES = ("hf-fsdp2-2node", "hf-zero3-2node")


@pytest.mark.each_store
def test_push_stores_every_file_as_it_is(world: World) -> None:
    saved = world.save("sft")
    done = world.push(saved, "--json")
    assert [c["phase"] for c in done.json["checkpoints"]] == ["sent"]
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path")
def test_an_upload_that_is_under_way_is_shown_with_who_sends_it(world: World) -> None:
    rows: dict[str, Any] = {}

    def is_uploading() -> bool:
        rows.update(world.ls())
        return {row["status"] for row in rows.values()} == {"UPLOADING"}

    for node, already in (("node0", []), ("node1", ["node0"])):
        part = world.save("sft", vector="hf-fsdp2-2node", node=node, ballast=4 << 20)
        slow = world.start(
            "push", part, "--store", world.store.url, "--node", node, "--bandwidth", "20KB/s"
        )
        world.until(is_uploading, "it to be UPLOADING")
        row = rows["sft/checkpoint-4"]
        assert (row["uploading"]["nodes"], row["nodes"]) == ([node], already)
        if already:
            status = world.at_store("status", "--json").json
            assert status["checkpoints"] == {"UPLOADING": 1}
            assert [u["nodes"] for run in status["runs"] for u in run["uploading"]] == [[node]]
        slow.kill()
        world.push(part, node=node)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.each_store
def test_a_worker_uploads_what_a_trainer_writes_and_a_head_makes_it_one_model(world: World) -> None:
    world.worker()
    world.head()
    saved = world.save("sft")
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.model("sft/checkpoint-4") == reference("hf-ddp")


@pytest.mark.parametrize(
    ("store", "vector"),
    [
        ("path", "hf-fsdp2-2node"),
        ("path", "hf-zero3-2node"),
        pytest.param("s3", "hf-zero3-2node", marks=in_exhaustive),
        pytest.param("sftp", "hf-fsdp2-2node", marks=in_exhaustive),
    ],
    indirect=["store"],
)
def test_two_nodes_make_one_checkpoint(world: World, vector: str) -> None:
    for node in ("node0", "node1"):
        world.worker(node)
    world.head()
    parts = [world.save("sft", vector=vector, node=node) for node in ("node0", "node1")]
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.stored("sft", "checkpoint-4") == {**files_below(parts[0]), **files_below(parts[1])}
    assert world.model("sft/checkpoint-4") == reference(vector)


@pytest.mark.stores("path")
@pytest.mark.parametrize("vector", TWO_NODES)
@pytest.mark.parametrize("apart", [0, 52], ids=["at once", "52 s apart"])
def test_a_late_node_completes_the_checkpoint(world: World, vector: str, apart: int) -> None:
    world.push(
        dated(world.save("sft", vector=vector, node="node0"), time.time() - apart), node="node0"
    )
    [row] = world.ls().values()
    assert row["status"] == "INCOMPLETE"
    assert row["evidence"], "nothing says what is missing"
    world.push(world.save("sft", vector=vector, node="node1"), node="node1")
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path")
def test_a_worker_joins_a_late_part_by_itself(world: World) -> None:
    world.push(
        dated(world.save("sft", vector="hf-fsdp2-2node", node="node0"), time.time() - 200),
        node="node0",
    )
    dated(world.save("sft", vector="hf-fsdp2-2node", node="node1"), time.time() - 100)
    world.worker("node1")
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert set(world.ls()) == {"sft/checkpoint-4"}


def of_run(found: dict[str, Row]) -> dict[str, Row]:
    """What was found of the run that the scenarios save in, by location."""
    return {name: row for name, row in found.items() if name.startswith("sft/")}


@pytest.mark.stores("path")
def test_a_part_of_the_next_save_is_not_joined_with_one_of_the_save_before(world: World) -> None:
    """Files have times to come: so a worker waits for proof until this scenario is over, however
    slow the machine is.
    """
    first, second = time.time() + 400.5, time.time() + 600.5
    world.push(dated(world.save("sft", vector="hf-fsdp2-2node", node="node0"), first), node="node0")
    shutil.rmtree(world.output("sft"))
    # begun anew; node 0 is slower
    dated(world.save("sft", vector="hf-fsdp2-2node", node="node1"), second)
    world.worker("node1")
    world.let_workers_look("node1")
    [(location, status)] = of_run(world.statuses()).items()
    assert location == "sft/checkpoint-4"
    assert status in {"UPLOADING", "INCOMPLETE", "WAITING"}  # node 1 sends its own part, or has
    state = dated(world.save("sft", vector="hf-fsdp2-2node", seed=1), second) / "trainer_state.json"
    world.worker("node0")
    world.until_told(lambda: "COMPLETE" in of_run(world.statuses()).values(), "the second save")
    [(location, row)] = [
        (name, row) for name, row in of_run(world.ls()).items() if row["status"] == "COMPLETE"
    ]
    assert location != "sft/checkpoint-4"
    assert row["nodes"] == ["node0", "node1"]
    assert world.stored(*location.split("/"))["trainer_state.json"] == state.read_bytes()
    assert world.ls()["sft/checkpoint-4"]["nodes"] == ["node0"]


def push_apart(world: World, apart: float = 3600) -> tuple[str, str, dict[str, bytes]]:
    """Two nodes' parts of one save that nothing ties together; their locations, and their files."""
    written: dict[str, bytes] = {}
    for node, seconds in (("node0", apart), ("node1", 0.0)):
        part = dated(world.save("sft", vector="hf-fsdp2-2node", node=node), time.time() - seconds)
        world.push(part, node=node)
        written |= files_below(part)
    first, second = sorted(world.ls())
    return first, second, written


@pytest.mark.stores("path")
def test_locations_that_may_be_one_save_name_each_other_and_the_command_that_joins_them(
    world: World,
) -> None:
    first, second, _ = push_apart(world)
    seen = world.ls()
    command = f"ckptsync join {first} '{second}' --store {world.store.url}"
    for location, other in ((first, second), (second, first)):
        [sibling] = seen[location]["siblings"]
        assert f"sft/{sibling['location']}" == other
        assert "s apart, more than" in " ".join(sibling["against"])
        assert sibling["join"] == command
        assert seen[location]["newer"] is None
    for words in ("ls", "status"):
        done = world.at_store(words)
        assert command in done.out
        assert "no node has uploaded" not in done.out
    told = world.at_store("status", "--json").json
    assert [row["siblings"][0]["join"] for row in told["locations"]] == [command, command]


def test_locations_are_joined_by_hand(world: World) -> None:
    first, second, written = push_apart(world)
    done = world.at_store("join", first, second, "--json").json
    assert (done["location"], done["moved"], done["changed"]) == (
        "checkpoint-4",
        {"node1": second.partition("/")[2]},
        True,
    )
    assert world.statuses() == {first: "COMPLETE"}
    assert world.stored("sft", "checkpoint-4") == written
    for words in ((first, second), (second, first)):
        assert world.at_store("join", *words, "--json").json["changed"] is False
    world.head()
    world.wait(first, "VERIFIED")
    assert world.model(first) == reference("hf-fsdp2-2node")
    world.at_store("pull", first, world.home / "back")
    assert files_below(world.home / "back/checkpoint-4") == written


@pytest.mark.stores("path")
def test_a_join_that_was_killed_goes_on(world: World) -> None:
    first, second, written = push_apart(world)
    words = ("join", first, second)
    store = ("--store", world.store.url)
    command = world.start(*words, *store, environment={"CKPTSYNC_LIMITS_BANDWIDTH": "100KB/s"})
    world.until(lambda: any("/join-" in name for name in world.store.names()), "the join's record")
    command.kill()
    assert world.at_store(*words).out
    assert world.statuses() == {first: "COMPLETE"}
    assert world.stored("sft", "checkpoint-4") == written


@pytest.mark.stores("path")
def test_what_is_joined_by_hand_and_kept_stays_kept_and_gone_when_it_goes(world: World) -> None:
    first, second, _ = push_apart(world)
    world.at_store("keep", second, "--reason", "the paper")
    world.at_store("join", first, second)
    assert [row["location"] for row in world.at_store("status", "--json").json["kept"]] == [
        "checkpoint-4"
    ]


@pytest.mark.stores("path")
def test_two_saves_are_not_joined(world: World) -> None:
    for seed in (0, 1):
        shutil.rmtree(world.output("sft"), ignore_errors=True)
        world.push(dated(world.save("sft", seed=seed), time.time() - 100 + seed))
    first, second = sorted(world.ls())
    before = world.store.names()
    assert all(row["siblings"] == [] for row in world.ls().values())
    done = world.at_store("join", first, second, "--json", code=2)
    assert "cannot be joined" in done.error["error"]
    for wrong in (
        (first, first),
        (first, "sft/checkpoint-8"),
        (first, "other/checkpoint-4"),
        ("checkpoint-4", second),
    ):
        world.at_store("join", *wrong, code=2)
    assert world.store.names() == before


@pytest.mark.each_store
def test_rotation_while_a_checkpoint_is_sent_loses_nothing(world: World) -> None:
    worker = world.worker(limits={"bandwidth": "4MB/s"})
    saved = world.save("sft", ballast=6_000_000)
    written = files_below(saved)
    worker.wait(phase="sending")
    shutil.rmtree(saved)
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert world.stored("sft", "checkpoint-4") == written


@pytest.mark.stores("path")
def test_a_save_that_is_overwritten_in_location_is_never_mixed_with_the_one_before(
    world: World,
) -> None:
    world.worker(limits={"bandwidth": "4MB/s"})
    saved = world.save("sft", ballast=4_000_000)
    first = files_below(saved)
    world.save("sft", ballast=4_000_000, seed=1)
    second = files_below(saved)
    world.until_statuses(lambda found: "COMPLETE" in found.values(), "a whole save")
    for location, status in world.statuses().items():
        if status == "COMPLETE":
            assert world.stored(*location.split("/")) in (first, second)
    world.until_statuses(
        lambda found: any(
            status == "COMPLETE" and world.stored(*location.split("/")) == second
            for location, status in found.items()
        ),
        "the last save",
    )


@pytest.mark.stores("path")
def test_a_training_that_begins_anew_keeps_both_trainings_saves(world: World) -> None:
    world.worker()
    for seed in (0, 1):
        shutil.rmtree(world.output("sft"), ignore_errors=True)
        world.save("sft", step=2, seed=seed)
        world.until_statuses(
            lambda found, count=seed + 1: [*found.values()] == ["COMPLETE"] * count,  # type: ignore[misc]
            "another location that is whole",
        )


@pytest.mark.stores("path")
def test_what_is_half_written_is_not_taken_for_a_checkpoint(world: World) -> None:
    worker = world.worker()
    world.save("sft", without="trainer_state.json")
    worker.wait(phase="waiting")
    world.save("other")
    world.wait("other/checkpoint-4", "COMPLETE")
    world.wait("sft/checkpoint-4", "WAITING")
