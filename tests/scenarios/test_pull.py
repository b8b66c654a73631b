"""A checkpoint comes back as it was, onto any node, and stays what it is in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.world import World, copy_save, files_below, reference, tensors, write_save

TWO_NODES = ("hf-fsdp2-2node", "hf-zero3-2node")


def two_nodes(world: World, vector: str) -> dict[str, bytes]:
    """A VERIFIED checkpoint of two nodes; its files."""
    head = world.head()
    written = world.push_two_nodes("sft", vector)
    world.wait("sft/checkpoint-4", "VERIFIED")
    head.stop()
    return written


@pytest.mark.parametrize("vector", TWO_NODES)
def test_the_newest_verified_checkpoint_comes_back_whole(world: World, tmp_path: Path, vector: str) -> None:
    written = two_nodes(world, vector)
    done = world.run("pull", "sft", tmp_path / "fresh", "--store", world.store.url, "--json")
    assert files_below(tmp_path / "fresh/checkpoint-4") == written
    assert done.json["place"] == "checkpoint-4"
    assert world.run("pull", "sft", tmp_path / "fresh", "--store", world.store.url, "--json").json["there"]["files"] == len(written)


@pytest.mark.stores("path")
def test_the_consolidated_model_comes_alone(world: World, tmp_path: Path) -> None:
    two_nodes(world, "hf-fsdp2-2node")
    world.run("pull", "sft", tmp_path / "model", "--store", world.store.url, "--consolidated")
    assert tensors((tmp_path / "model/model.safetensors").read_bytes()) == reference("hf-fsdp2-2node")
    assert (tmp_path / "model/config.json").is_file()


@pytest.mark.stores("path")
@pytest.mark.parametrize("vector", TWO_NODES)
@pytest.mark.parametrize("names", [("node0", "node1"), ("fresh0", "fresh1")], ids=["same nodes", "fresh nodes"])
def test_a_pulled_checkpoint_stays_verified_beside_workers(world: World, vector: str, names: tuple[str, str]) -> None:
    written = two_nodes(world, vector)
    for node in ("node0", "node1"):
        for path in sorted(world.output("sft", node).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    world.run("pull", "sft/checkpoint-4", world.output("sft", "a"), "--store", world.store.url)
    world.run("pull", "sft/checkpoint-4", world.output("sft", "b"), "--store", world.store.url, "--node", "node1")
    stays_verified(world, names, written)


@pytest.mark.stores("path")
@pytest.mark.parametrize("vector", TWO_NODES)
def test_shards_copied_between_nodes_change_no_status(world: World, vector: str) -> None:
    written = two_nodes(world, vector)
    for one, other in (("node0", "node1"), ("node1", "node0")):
        copy_save(world.output("sft", one), world.output("sft", other))
    for node, at in (("node0", "a"), ("node1", "b")):
        world.output("sft", node).parent.parent.rename(world.home / at)
    stays_verified(world, ("node0", "node1"), written)


def stays_verified(world: World, names: tuple[str, str], written: dict[str, bytes]) -> None:
    """Workers on `a` and `b` look at what was pulled; a new checkpoint shows that they have, and nothing of the old one changes."""
    before = [name for name in world.store.names() if "/manifest-" in name]
    workers = [
        world.worker(name, worker={"runs": [{"path": f"{world.home}/{at}/out/*"}]}) for name, at in zip(names, "ab", strict=True)
    ]
    world.wait_at_rest()
    write_save(world.home / "a/out/sft/checkpoint-8", "hf-ddp")
    world.wait("sft/checkpoint-8", "COMPLETE")
    world.wait_at_rest()
    assert world.statuses()["sft/checkpoint-4"] == "VERIFIED"
    assert set(world.statuses()) == {"sft/checkpoint-4", "sft/checkpoint-8"}
    assert [name for name in world.store.names() if "checkpoint-4/manifest-" in name] == before
    assert all(worker.is_running() for worker in workers)
    world.run("pull", "sft/checkpoint-4", world.home / "again", "--store", world.store.url)
    assert files_below(world.home / "again/checkpoint-4") == written


@pytest.mark.stores("path")
def test_nothing_that_is_there_is_overwritten(world: World, tmp_path: Path) -> None:
    world.push(world.save("sft"))
    mine = tmp_path / "back/checkpoint-4"
    mine.mkdir(parents=True)
    (mine / "model.safetensors").write_bytes(b"mine")
    world.run("pull", "sft/checkpoint-4", tmp_path / "back", "--store", world.store.url, "--unverified", code=2)
    assert files_below(tmp_path / "back") == {"checkpoint-4/model.safetensors": b"mine"}


@pytest.mark.stores("path")
def test_a_checkpoint_that_is_not_whole_is_not_given_unasked(world: World, tmp_path: Path) -> None:
    world.push(world.save("sft", vector="hf-fsdp2-2node", node="node0"))
    done = world.run("pull", "sft/checkpoint-4", tmp_path / "back", "--store", world.store.url, "--json", code=3)
    assert "__2_0.distcp" in done.out + done.err
    assert not (tmp_path / "back/checkpoint-4").exists()
    world.run("pull", "nobody", tmp_path / "back", "--store", world.store.url, code=2)
