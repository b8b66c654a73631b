"""Damage in a store is found, said, and repaired from what a node or the shards still hold.

Nothing damaged is given away.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import blake3
import pytest

from tests.scenarios.conftest import Prepared
from tests.scenarios.stores import Directory, Store
from tests.scenarios.world import World, files_below, flipped, reference

WEIGHTS = "sft/checkpoint-4/model.safetensors"


def flip(store: Store, name: str) -> None:
    store.write(name, flipped(store.read(name)))


def truncate(store: Store, name: str) -> None:
    store.write(name, store.read(name)[:-7])


def remove(store: Store, name: str) -> None:
    store.delete(name)


def harm(
    world: World, location: str, harms: Mapping[str, Callable[[Store, str], None]]
) -> dict[str, bytes]:
    """Damage a file of the location in each of these ways; what they held."""
    right = {f"{location}/{name}": world.store.read(f"{location}/{name}") for name in harms}
    for name, do in harms.items():
        do(world.store, f"{location}/{name}")
    return right


SHARDS = {"model.safetensors": flip, "optimizer.pt": truncate, "trainer_state.json": remove}
MODEL = {"model.safetensors": flip, "config.json": truncate, "tokenizer.json": remove}


@pytest.mark.each_store
def test_the_node_that_has_the_files_uploads_them_again(world: World) -> None:
    worker = world.worker()
    saved = world.save("sft")
    world.wait("sft/checkpoint-4", "COMPLETE")
    worker.stop()
    right = harm(world, "sft/checkpoint-4", SHARDS)
    world.verify(code=10)
    worker.start()
    for name, data in right.items():
        world.until_stored(name, data)
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
    world.until_stored(name, right)
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.model("sft/checkpoint-4") == reference("hf-fsdp2-2node")


@pytest.mark.stores("path", "s3")
def test_a_consolidated_model_is_made_again(world: World, prepared: Prepared) -> None:
    world.fill(prepared("hf-ddp", 4))
    right = harm(world, "sft/consolidated/checkpoint-4", MODEL)
    world.head(verify={"period": "3s"})
    for name, data in right.items():
        world.until_stored(name, data)
    world.wait("sft/checkpoint-4", "VERIFIED")


@pytest.mark.stores("path", "s3")
def test_a_damaged_record_hides_nothing_else(world: World) -> None:
    worker = world.worker()
    for run in ("sft", "other"):
        world.save(run)
        world.wait(f"{run}/checkpoint-4", "COMPLETE")
    worker.stop()
    [manifest] = [
        name
        for name in world.store.names()
        if name.startswith("sft/.ckptsync/checkpoint-4/manifest-")
    ]
    right = world.store.read(manifest)
    for data in (flipped(right), b"", b"\xff\xfe", right[: len(right) // 2], b"[" * 100_000):
        world.store.write(manifest, data)
        done = world.at_store("ls", "--json", code=10)
        assert [
            location["status"] for location in done.json["locations"] if location["run"] == "other"
        ] == ["COMPLETE"]
        assert manifest in str(done.json["unreadable"])
    worker.start()
    world.until_stored(manifest, right)
    assert world.statuses() == {"other/checkpoint-4": "COMPLETE", "sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path")
@pytest.mark.parametrize("kind", ["model", "report"])
def test_a_damaged_record_of_a_head_or_a_verifier_is_told_and_made_again(
    world: World, prepared: Prepared, kind: str
) -> None:
    world.fill(prepared("hf-ddp", 4))
    [name] = [
        name for name in world.records() if name.startswith(f"sft/.ckptsync/checkpoint-4/{kind}-")
    ]
    flip(world.store, name)
    done = world.at_store("ls", "--json", code=10)
    assert name in str(done.json["unreadable"])
    world.head().wait(phase="verified", run="sft", location="checkpoint-4")

    def status() -> str:
        [location] = world.finish("ls", "--store", world.store.url, "--json").json["locations"]
        return str(location["status"])

    world.until_told(lambda: status() == "VERIFIED", "the record to be made again")


def test_a_record_that_names_a_file_outside_of_its_location_is_refused(
    world: World, prepared: Prepared, tmp_path: Path
) -> None:
    files = dict(prepared("hf-ddp", 4))
    [name] = [name for name in files if name.startswith("sft/.ckptsync/checkpoint-4/manifest-")]
    forged = files.pop(name).replace(b'"path":"scheduler.pt"', b'"path":"../../../evil"')
    digest = blake3.blake3(forged).hexdigest()[:16]
    world.fill(files | {f"{name.rpartition('-')[0]}-{digest}.json": forged})
    assert world.at_store("ls", "--json", code=10).json["unreadable"]
    before = files_below(tmp_path)
    for more in ((), ("--unverified",), ("--consolidated",)):
        done = world.finish(
            "pull", "sft/checkpoint-4", tmp_path / "a/b/c", "--store", world.store.url, *more
        )
        assert done.code, done.out
    made = {name for name in files_below(tmp_path) if name not in before}
    assert not [name for name in made if "evil" in name]


@pytest.mark.stores("path", "sftp")
def test_a_link_in_a_store_is_not_followed(world: World, tmp_path: Path) -> None:
    assert isinstance(world.store, Directory)
    saved = world.save("sft")
    world.push(saved)
    secret = tmp_path / "secret"
    secret.write_bytes((saved / "model.safetensors").read_bytes())
    (world.store.root / WEIGHTS).unlink()
    (world.store.root / WEIGHTS).symlink_to(secret)
    done = world.at_store("pull", "sft/checkpoint-4", tmp_path / "back", code=3)
    assert "model.safetensors" in done.out + done.err
    assert not (tmp_path / "back/checkpoint-4").exists()


@pytest.mark.stores("path")
def test_damage_that_nobody_can_repair_is_said_to_be_lost(world: World) -> None:
    worker = world.worker()
    world.save("sft")
    world.wait("sft/checkpoint-4", "COMPLETE")
    worker.stop()
    for path in world.output("sft").iterdir():
        shutil.rmtree(path)
    flip(world.store, WEIGHTS)
    world.verify(code=10)
    worker.start()
    worker.wait(phase="not-repaired", run="sft")
    world.until_told(
        lambda: "LOST" in world.finish("repair", "--store", world.store.url, "--dry-run").out,
        "the loss to be said",
    )
    assert worker.is_running()
