"""Damage in a store is found, said, and repaired from what a node or the shards still hold; nothing damaged is given away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scenarios.stores import Store
from tests.scenarios.world import World, files_below, flipped, reference

WEIGHTS = "sft/checkpoint-4/model.safetensors"


def flip(store: Store, name: str) -> None:
    store.write(name, flipped(store.read(name)))


def truncate(store: Store, name: str) -> None:
    store.write(name, store.read(name)[:-7])


def remove(store: Store, name: str) -> None:
    store.delete(name)


HARM: dict[str, Callable[[Store, str], None]] = {"flipped": flip, "truncated": truncate, "missing": remove}
harms = pytest.mark.parametrize("harm", HARM.values(), ids=HARM)


@harms
def test_verify_by_hand_finds_it_and_everybody_knows_it_then(world: World, harm: Callable[[Store, str], None]) -> None:
    world.push(world.save("sft"))
    world.verify()
    harm(world.store, WEIGHTS)
    done = world.verify(code=10)
    assert WEIGHTS.removeprefix("sft/") in str(done.json["reports"])
    assert world.statuses() == {"sft/checkpoint-4": "DAMAGED"}
    world.run("status", world.store.url, "--check", code=10)


@pytest.mark.stores("path", "s3")
@harms
def test_the_node_that_has_it_uploads_it_again(world: World, harm: Callable[[Store, str], None]) -> None:
    world.worker()
    saved = world.save("sft")
    world.wait("sft/checkpoint-4", "COMPLETE")
    harm(world.store, WEIGHTS)
    world.verify(code=10)
    world.until(
        lambda: WEIGHTS in world.store.names() and world.store.read(WEIGHTS) == (saved / "model.safetensors").read_bytes(),
        "the repair",
    )
    world.verify()
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}
    assert world.stored("sft", "checkpoint-4") == files_below(saved)


@pytest.mark.stores("path")
def test_services_find_and_repair_it_by_themselves(world: World) -> None:
    for node in ("node0", "node1"):
        world.worker(node)
    world.head(verify={"period": "3s"})
    for node in ("node0", "node1"):
        world.save("sft", vector="hf-fsdp2-2node", node=node)
    world.wait("sft/checkpoint-4", "VERIFIED")
    name = "sft/checkpoint-4/pytorch_model_fsdp_0/__2_0.distcp"
    right = world.store.read(name)
    flip(world.store, name)
    world.until(lambda: world.store.read(name) == right, "the repair")
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.model("sft/checkpoint-4") == reference("hf-fsdp2-2node")


@pytest.mark.stores("path", "s3")
@harms
def test_a_consolidated_model_is_made_again(world: World, harm: Callable[[Store, str], None]) -> None:
    world.push(world.save("sft"))
    world.head(verify={"period": "3s"})
    world.wait("sft/checkpoint-4", "VERIFIED")
    name = "sft/consolidated/checkpoint-4/model.safetensors"
    right = world.store.read(name)
    harm(world.store, name)
    world.until(lambda: name in world.store.names() and world.store.read(name) == right, "the model to be made again")
    world.wait("sft/checkpoint-4", "VERIFIED")


@pytest.mark.stores("path")
def test_repair_by_hand_reads_before_it_says_that_all_is_well(world: World) -> None:
    world.push(world.save("sft"))
    world.run("repair", world.store.url, "sft/checkpoint-4", "--json")
    flip(world.store, WEIGHTS)
    done = world.run("repair", world.store.url, "sft/checkpoint-4", "--json", code=3)
    assert "model.safetensors" in done.out
    assert world.statuses() == {"sft/checkpoint-4": "DAMAGED"}


@pytest.mark.stores("path")
def test_what_no_record_names_is_said_and_not_read(world: World) -> None:
    world.push(world.save("sft"))
    world.store.write("sft/checkpoint-4/stranger.bin", b"not ours")
    done = world.verify()
    assert "stranger.bin" in str(done.json["reports"])
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path", "s3")
def test_a_damaged_record_hides_nothing_else(world: World) -> None:
    worker = world.worker()
    for run in ("sft", "other"):
        world.save(run)
        world.wait(f"{run}/checkpoint-4", "COMPLETE")
    worker.stop()
    [manifest] = [name for name in world.store.names() if name.startswith("sft/.ckptsync/checkpoint-4/manifest-")]
    right = world.store.read(manifest)
    for data in (flipped(right), b"", b"\xff\xfe", right[: len(right) // 2], b"[" * 100_000):
        world.store.write(manifest, data)
        done = world.run("ls", world.store.url, "--json", code=10)
        assert [place["word"] for place in done.json["places"] if place["run"] == "other"] == ["COMPLETE"]
        assert manifest in str(done.json["unreadable"])
    worker.start()
    world.until(lambda: world.store.read(manifest) == right, "the node to write its record again")
    assert world.statuses() == {"other/checkpoint-4": "COMPLETE", "sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path")
def test_a_damaged_heartbeat_hides_nothing_else(world: World) -> None:
    worker, head = world.worker(), world.head()
    world.save("sft")
    world.wait("sft/checkpoint-4", "VERIFIED")
    worker.kill()
    [beat] = [name for name in world.store.names() if name == ".ckptsync/nodes/node0.json"]
    world.store.write(beat, world.store.read(beat).replace(b'"', b'\xff"', 1))
    done = world.run("status", world.store.url, "--json")
    assert "node0" in str(done.json["alarms"])
    world.push(world.save("other"))
    world.wait("other/checkpoint-4", "VERIFIED")
    assert head.is_running()


@pytest.mark.stores("path", "s3")
def test_pull_gives_nothing_that_is_damaged(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    world.push(saved)
    flip(world.store, WEIGHTS)
    words = ("pull", "sft/checkpoint-4", tmp_path / "back", "--store", world.store.url, "--unverified")
    done = world.run(*words, "--json", code=10)
    assert "model.safetensors" in str(done.json["failed"])
    assert not (tmp_path / "back/checkpoint-4").exists()
    world.store.write(WEIGHTS, (saved / "model.safetensors").read_bytes())
    world.run(*words)
    assert files_below(tmp_path / "back/checkpoint-4") == files_below(saved)


@pytest.mark.stores("path")
def test_damage_that_nobody_can_repair_is_said_to_be_lost(world: World) -> None:
    worker = world.worker()
    world.save("sft")
    world.wait("sft/checkpoint-4", "COMPLETE")
    for path in world.output("sft").iterdir():
        shutil.rmtree(path)
    flip(world.store, WEIGHTS)
    world.verify(code=10)
    world.until(lambda: "LOST" in world.start("repair", world.store.url, "--dry-run").end().out, "the loss to be said")
    assert worker.is_running()
