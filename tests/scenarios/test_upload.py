"""A checkpoint gets from the nodes that wrote it into the store, whole, once, and as one save."""

from __future__ import annotations

import shutil

import pytest

from tests.scenarios.world import World, files_below, reference

TWO_NODES = ("hf-fsdp2-2node", "hf-zero3-2node")


def test_push_stores_every_file_as_it_is(world: World) -> None:
    saved = world.save("sft")
    done = world.push(saved, "--json")
    assert [c["phase"] for c in done.json["checkpoints"]] == ["sent"]
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


def test_push_again_sends_nothing_again(world: World) -> None:
    saved = world.save("sft")
    world.push(saved)
    before = {name: world.store.identity(name) for name in world.store.names() if name.startswith("sft/")}
    world.push(saved)
    assert {name: world.store.identity(name) for name in world.store.names() if name.startswith("sft/")} == before


@pytest.mark.stores("path")
def test_push_dry_run_changes_nothing(world: World) -> None:
    saved = world.save("sft")
    world.push(saved, "--dry-run")
    assert world.store.names() == []


def test_a_worker_uploads_what_a_trainer_writes_and_a_head_makes_it_one_model(world: World) -> None:
    world.worker()
    world.head()
    saved = world.save("sft")
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.model("sft/checkpoint-4") == reference("hf-ddp")


@pytest.mark.parametrize("vector", TWO_NODES)
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
def test_a_late_node_completes_the_checkpoint(world: World, vector: str) -> None:
    parts = [world.save("sft", vector=vector, node=node) for node in ("node0", "node1")]
    world.push(parts[0], node="node0")
    [row] = world.ls().values()
    assert row["word"] == "ARRIVING"
    assert row["evidence"], "nothing says what is missing"
    world.push(parts[1], node="node1")
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


def test_rotation_while_a_checkpoint_is_sent_loses_nothing(world: World) -> None:
    worker = world.worker(limits={"bandwidth": "4MB/s"})
    saved = world.save("sft", ballast=6_000_000)
    written = files_below(saved)
    worker.wait(phase="sending")
    shutil.rmtree(saved)
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert world.stored("sft", "checkpoint-4") == written


@pytest.mark.stores("path")
def test_a_save_that_is_overwritten_in_place_is_never_mixed_with_the_one_before(world: World) -> None:
    world.worker(limits={"bandwidth": "4MB/s"})
    saved = world.save("sft", ballast=4_000_000)
    first = files_below(saved)
    world.save("sft", ballast=4_000_000, seed=1)
    second = files_below(saved)
    world.until(lambda: "COMPLETE" in world.statuses().values(), "a whole save")
    for place, status in world.statuses().items():
        if status == "COMPLETE":
            assert world.stored(*place.split("/")) in (first, second)
    world.until(lambda: any(world.stored(*p.split("/")) == second for p in world.statuses()), "the last save")


def test_a_second_save_of_one_name_has_a_place_of_its_own(world: World) -> None:
    first = files_below(world.save("sft"))
    world.push(world.output("sft") / "checkpoint-4")
    shutil.rmtree(world.output("sft"))
    second = files_below(world.save("sft", seed=1))
    world.push(world.output("sft") / "checkpoint-4")
    assert sorted(world.statuses().values()) == ["COMPLETE", "COMPLETE"]
    assert [world.stored(*place.split("/")) for place in sorted(world.statuses())] == [first, second]


@pytest.mark.stores("path")
def test_a_training_that_begins_anew_keeps_both_trainings_saves(world: World) -> None:
    world.worker()
    for seed in (0, 1):
        shutil.rmtree(world.output("sft"), ignore_errors=True)
        world.save("sft", step=2, seed=seed)
        world.until(lambda n=seed + 1: len(world.statuses()) == n, "another place")  # type: ignore[misc]
        world.until(lambda: set(world.statuses().values()) == {"COMPLETE"}, "both to be whole")


@pytest.mark.stores("path")
def test_one_name_from_two_nodes_with_other_bytes_is_not_one_checkpoint(world: World) -> None:
    parts = [world.save("sft", node=node, seed=n) for n, node in enumerate(("node0", "node1"))]
    for part, node in zip(parts, ("node0", "node1"), strict=True):
        world.push(part, node=node)
    whole = [place for place, status in world.statuses().items() if status == "COMPLETE"]
    for place in whole:
        assert world.stored(*place.split("/")) in [files_below(part) for part in parts]
    assert len(whole) == 2 or set(world.statuses().values()) == {"AMBIGUOUS"}


@pytest.mark.stores("path")
def test_what_is_half_written_is_not_taken_for_a_checkpoint(world: World) -> None:
    worker = world.worker()
    world.save("sft", without="trainer_state.json")
    worker.wait(phase="waiting")
    world.save("other")
    world.wait("other/checkpoint-4", "COMPLETE")
    assert "sft/checkpoint-4" not in world.statuses()
