"""The campaigns with trainers, real and replayed, in short: `make campaign-trainers` and `make
campaign-hostile` are the long ones.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.campaigns import hostile
from tests.campaigns.cluster import Service, at_work, longest
from tests.campaigns.judged import Judge
from tests.campaigns.nodes import Namespace, Network, can_isolate
from tests.campaigns.replayed import Replay
from tests.campaigns.two_nodes import NODES, START, Job, TwoNodes, can_train, default_python, finish
from tests.support.exhaustive import in_exhaustive

PYTHON = default_python()
LONG = 30
NEEDS_TRAINER = pytest.mark.skipif(
    not can_train(PYTHON),
    reason=(
        "CKPTSYNC_TEST_TRAINER names no Python with transformers and accelerate, and this one has"
        " them not"
    ),
)
NEEDS_ISOLATION = pytest.mark.skipif(
    not can_isolate(), reason="only root may make network namespaces"
)


@in_exhaustive
@NEEDS_TRAINER
def test_every_step_of_a_training_on_two_nodes_is_in_the_store_as_the_framework_gathered_it(
    tmp_path: Path,
) -> None:
    job = Job("run", "ddp", hook=True, steps=3, ranks=1)
    with ExitStack() as stack:
        network = stack.enter_context(closing(Network(NODES))) if can_isolate() else None
        nodes = stack.enter_context(
            closing(TwoNodes(tmp_path, "posix", PYTHON, {"quiet": "1s"}, network))
        )
        for n in range(NODES):
            nodes.begin(n)
        with nodes.training(job) as trainers:
            codes = finish(trainers, START)
        judge = Judge(nodes, job)
        judge.wait(60)
        tally = judge.tally(codes)
    assert tally.wrong == ()
    assert (tally.saved, tally.wanted) == (3, 3)


def test_a_judge_sees_what_is_missed_torn_and_touched(tmp_path: Path) -> None:
    replay = Replay(tmp_path, {})
    replay.save("run", 1)
    assert replay.judged(0)[0] == "run/checkpoint-1: MISSED"
    pushed = [
        sys.executable,
        "-m",
        "ckptsync",
        "push",
        str(replay.out("run") / "checkpoint-1"),
        "--store",
        replay.store.url,
        "--run",
        "run",
        "--node",
        "node",
    ]
    subprocess.run(pushed, check=True, capture_output=True)
    assert replay.judged(0) == []
    stored = tmp_path / "store" / "run" / "checkpoint-1" / "model.safetensors"
    stored.write_bytes(bytes(stored.stat().st_size))
    (replay.out("run") / "checkpoint-1" / "ours").touch()
    shutil.copytree(replay.out("run") / "checkpoint-1", tmp_path / "truth" / "run" / "checkpoint-2")
    assert replay.judged(0) == [
        "run/checkpoint-1/model.safetensors: TORN, not the bytes that the trainer wrote",
        "run/checkpoint-2: MISSED",
        f"{replay.out('run') / 'checkpoint-1'}: was touched",
    ]


def test_a_worker_is_asked_for_what_it_could_see(tmp_path: Path) -> None:
    lives = at_work([(10.2, 14.0), (14.5, 15.5), (16.0, float("inf"))], [11.0, 15.0, 17.0])
    assert lives == [(12.0, 14.0), (18.0, float("inf"))]
    assert [longest(lives, begin, 20.0) for begin in (0.0, 13.0, 19.0)] == [2.0, 2.0, 1.0]
    assert longest([], 0.0, 9.0) == 0.0
    service = Service(tmp_path, "n", "worker")
    service.log.write_text(
        '{"time": "2026-11-21T16:00:00Z", "phase": "started", "node": "n"}\n{"torn'
    )
    assert service.at_work() == []


def _reaches(node: Namespace, address: tuple[str, int], patience: float) -> bool:
    """Whether a connection is made within so many seconds.

    A link that is up again carries nothing for a moment, so a failed attempt is made again.
    """
    ask = f"import socket; socket.create_connection({address!r}, 1)"
    end = time.monotonic() + patience
    while subprocess.run(
        node.within(sys.executable, "-c", ask), capture_output=True, check=False
    ).returncode:
        if time.monotonic() > end:
            return False
    return True


@NEEDS_ISOLATION
def test_a_node_that_is_cut_off_reaches_the_hub_no_more_until_it_is_mended() -> None:
    with closing(Network(NODES)) as network, closing(network.hub.listener()) as listener:
        address = (network.address, listener.getsockname()[1])

        def answers(patience: float) -> list[bool]:
            return [_reaches(node, address, patience) for node in network.nodes]

        assert answers(LONG) == [True, True]
        network.cut(0)
        assert answers(1) == [False, True]
        network.mend(0)
        assert answers(LONG) == [True, True]


@in_exhaustive
@pytest.mark.parametrize("name", ["clock"])
def test_a_worker_in_hostile_surroundings_misses_nothing(tmp_path: Path, name: str) -> None:
    if why := hostile.missing(name):
        pytest.skip(why)
    assert hostile.main(["--only", name, "--home", str(tmp_path)]) == 0
