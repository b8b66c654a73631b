"""`ckptsync doctor` before a launch: nodes that wait for each other get one answer.

What a node finds on itself is repeated; bad stores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.world import Command, Done, World
from tests.support.exhaustive import in_exhaustive
from tests.support.ports import unused_port

path_only = pytest.mark.stores("path")
VARIABLES = (
    "NNODES",
    "NODE_RANK",
    "NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RDZV_ID",
    "USE_RAY",
    "CUDA_VISIBLE_DEVICES",
)
SOUND = {
    "NNODES": "2",
    "NPROC_PER_NODE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(unused_port()),
    "CUDA_VISIBLE_DEVICES": "",
}
LONG, SHORT = "90s", "3s"


@pytest.fixture(autouse=True)
def _no_launch_around(world: World) -> None:
    for name in (*VARIABLES, "SLURM_JOB_ID", "MIN_NNODES", "MAX_NNODES"):
        world.environment.pop(name, None)


def waiting(
    world: World, rank: int, *words: object, wait: str = LONG, node: str = "", **variables: str
) -> Command:
    """A job script's check on one node of two, started."""
    environment = {**SOUND, "NODE_RANK": str(rank), **variables}
    given = [
        "doctor",
        "--json",
        "--publish",
        "--wait",
        wait,
        "--node",
        node or f"n{rank}",
        *words,
        "--store",
        world.store.url,
    ]
    return world.start(*given, environment=environment)


def pair(world: World, *words: object, **second: str) -> tuple[Done, Done]:
    """Both nodes' answers; `second`: variables of the second node alone."""
    nodes = [waiting(world, 0, *words), waiting(world, 1, *words, **second)]
    first, last = (node.end() for node in nodes)
    return first, last


def failures(done: Done) -> set[tuple[str, str]]:
    return {(f["kind"], f["subject"]) for f in done.json["findings"] if f["level"] == "fail"}


def same(first: Done, second: Done) -> Any:
    assert first.code == second.code, f"{first.out}\n{second.out}"
    keys = ("nodes", "findings", "failures", "warnings", "exit_code")
    assert [first.json[key] for key in keys] == [second.json[key] for key in keys]
    return first.json


def test_nodes_that_fit_together_may_start_whoever_comes_first(world: World) -> None:
    first = waiting(world, 0)
    world.until(
        lambda: ".ckptsync/launches/n0.json" in world.store.names(), "the first node's facts"
    )
    answer = same(waiting(world, 1).end(), first.end())
    assert (answer["nodes"], answer["failures"], answer["exit_code"]) == (["n0", "n1"], 0, 0)


@path_only
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"NODE_RANK": "0"}, ("node-rank", "NODE_RANK")),
        ({"MASTER_PORT": "29498"}, ("launch-differs", "MASTER_PORT")),
        pytest.param({"NNODES": "2:3"}, ("launch-differs", "NNODES"), marks=in_exhaustive),
    ],
)
def test_nodes_that_do_not_fit_together_are_both_stopped(
    world: World, variables: dict[str, str], found: tuple[str, str]
) -> None:
    answer = same(*pair(world, **variables))
    assert answer["exit_code"] == 2
    assert found in {(f["kind"], f["subject"]) for f in answer["findings"]}
    assert answer["nodes"] == ["n0", "n1"]


@path_only
def test_when_the_time_is_over_the_missing_nodes_are_named(world: World) -> None:
    done = waiting(world, 1, wait=SHORT, NNODES="3").end()
    assert done.code == 2
    (missing,) = [f for f in done.json["findings"] if f["kind"] == "nodes-missing"]
    assert "2 of 3 nodes" in missing["what"]
    assert "NODE_RANK 0, 2" in missing["what"]


@path_only
def test_what_an_earlier_launch_published_is_not_taken_for_this_one(world: World) -> None:
    same(*pair(world))
    done = waiting(world, 0, wait=SHORT).end()
    assert (done.code, done.json["nodes"]) == (2, ["n0"])
    assert ("nodes-missing", "NNODES") in failures(done)
    assert "n1" in str([f["hint"] for f in done.json["findings"]])
    assert same(*pair(world))["exit_code"] == 0


@path_only
def test_how_many_nodes_there_are_may_be_said_and_must_be_known(world: World) -> None:
    assert waiting(world, 0, NNODES="").end().code == 2
    nodes = [waiting(world, rank, "--nnodes", "2", NNODES="") for rank in (0, 1)]
    assert same(*(node.end() for node in nodes))["nodes"] == ["n0", "n1"]
    for wait in ("soon", "", "0s"):
        world.at_store("doctor", "--publish", "--wait", wait, "--nnodes", "2", code=2)
    world.at_store("doctor", "--wait", "2m", code=2)


@path_only
def test_two_trainings_in_one_store_are_told_apart_by_their_job(world: World) -> None:
    # each of them listens on its port for a moment, to see whether it is free
    ports = {job: str(unused_port()) for job in ("a", "b")}
    nodes = [
        waiting(world, rank, "--job", job, node=f"{job}{rank}", MASTER_PORT=port)
        for job, port in ports.items()
        for rank in (0, 1)
    ]
    done = [node.end() for node in nodes]
    assert [one.json["nodes"] for one in done] == [["a0", "a1"]] * 2 + [["b0", "b1"]] * 2
    assert [one.code for one in done] == [0] * 4


@path_only
def test_a_node_that_takes_the_location_of_another_does_not_let_it_start(world: World) -> None:
    first = waiting(world, 0, node="same")
    world.until(
        lambda: ".ckptsync/launches/same.json" in world.store.names(), "the first node's facts"
    )
    second = waiting(world, 1, wait=SHORT, node="same")
    assert (first.end().code, second.end().code) == (2, 2)


@path_only
def test_what_a_node_finds_on_itself_stops_the_others_and_is_repeated(world: World) -> None:
    output = world.output("sft", "n0")
    output.mkdir(parents=True)
    (output / "_ckptsync").write_text("a file, where the worker's own directory should be")
    nodes = [waiting(world, 0, "--output-dir", output), waiting(world, 1)]
    assert ("output-not-writable", str(output)) in failures(first := nodes[0].end())
    assert same(first, nodes[1].end())["exit_code"] == 2
    repeated = world.at_store("doctor", "--json", code=2).json["findings"]
    (found,) = [f for f in repeated if f["kind"] == "output-not-writable"]
    assert (found["nodes"], found["subject"]) == (["n0"], str(output))


@path_only
def test_no_store_and_unknown_stores_are_said_first(world: World) -> None:
    for words in (["--store", ""], ["--publish"], ["--nodes"]):
        assert "no store is named" in world.run("doctor", *words, code=2).err
    for words in (["--store", "foo://bucket/x"], ["--publish", "--store", "foo://bucket/x"]):
        done = world.run("doctor", *words, code=2)
        assert "foo:// are not known" in (done.err + done.out).splitlines()[0]
    assert "s3://" in world.run("doctor", "--store", "s4://bucket/x", code=2).err


@path_only
def test_no_store_is_made_below_a_missing_directory(world: World, tmp_path: Path) -> None:
    missing = tmp_path / "missing/store"
    done = world.run("doctor", "--publish", "--store", missing, code=2)
    assert done.out.splitlines()[0].endswith(f"there is no directory {missing.parent}")
    assert not missing.parent.exists()
    world.run("doctor", "--publish", "--store", tmp_path / "new")
    assert (tmp_path / "new").is_dir()
