"""A checkpoint comes back as it was, onto any node, and stays what it is in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.conftest import Prepared
from tests.scenarios.world import World, files_below, written
from tests.support.exhaustive import in_exhaustive


@pytest.mark.parametrize(
    ("store", "vector"),
    [
        ("path", "hf-fsdp2-2node"),
        ("path", "hf-zero3-2node"),
        ("s3", "hf-fsdp2-2node"),
        ("sftp", "hf-zero3-2node"),
    ],
    indirect=["store"],
)
def test_the_newest_verified_checkpoint_comes_back_whole(
    world: World, prepared: Prepared, tmp_path: Path, vector: str
) -> None:
    world.fill(prepared(vector, 4))
    sent = written(vector, tmp_path)
    done = world.at_store("pull", "sft", tmp_path / "fresh", "--json")
    assert files_below(tmp_path / "fresh/checkpoint-4") == sent
    assert done.json["location"] == "checkpoint-4"
    assert world.at_store("pull", "sft", tmp_path / "fresh", "--json").json["there"][
        "files"
    ] == len(sent)


@pytest.mark.stores("path")
@pytest.mark.parametrize(
    ("vector", "names"),
    [
        ("hf-fsdp2-2node", ("node0", "node1")),
        ("hf-zero3-2node", ("fresh0", "fresh1")),
        pytest.param("hf-fsdp2-2node", ("fresh0", "fresh1"), marks=in_exhaustive),
        pytest.param("hf-zero3-2node", ("node0", "node1"), marks=in_exhaustive),
    ],
)
def test_a_pulled_checkpoint_stays_verified_beside_workers(
    world: World, prepared: Prepared, tmp_path: Path, vector: str, names: tuple[str, str]
) -> None:
    world.fill(prepared(vector, 4))
    world.at_store("pull", "sft/checkpoint-4", world.output("sft", "a"))
    world.at_store("pull", "sft/checkpoint-4", world.output("sft", "b"), "--node", "node1")
    stays_verified(world, names, written(vector, tmp_path / "written"))


def stays_verified(world: World, names: tuple[str, str], sent: dict[str, bytes]) -> None:
    """Workers look at what was pulled to `a` and `b`, and nothing of it changes."""
    before = world.records()
    workers = [
        world.worker(name, worker={"runs": [{"path": f"{world.home}/{at}/out/*"}]})
        for name, at in zip(names, "ab", strict=True)
    ]
    for worker in workers:
        worker.wait(phase="started")
    world.let_workers_look("a", "b")
    assert {
        name: status for name, status in world.statuses().items() if name.startswith("sft/")
    } == {"sft/checkpoint-4": "VERIFIED"}
    assert [name for name in world.records() if name.startswith("sft/")] == before
    assert all(worker.is_running() for worker in workers)
    world.at_store("pull", "sft/checkpoint-4", world.home / "again")
    assert files_below(world.home / "again/checkpoint-4") == sent


@pytest.mark.stores("path")
def test_names_that_only_some_file_systems_tell_apart_come_back(
    world: World, tmp_path: Path
) -> None:
    path = world.save("sft")
    for name in ("Notes.txt", "notes.txt", "caf\u00e9", "cafe\u0301", "A/x", "a/X"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name, encoding="utf-8")
    sent = files_below(path)
    told = world.push(path).out
    assert "A/x and a/X (and 2 more): names that can be pulled only to file systems" in told
    world.head()
    world.wait("sft/checkpoint-4", "VERIFIED")
    world.at_store("pull", "sft", tmp_path / "back")
    assert files_below(tmp_path / "back/checkpoint-4") == sent
