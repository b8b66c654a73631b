"""The judge of real trainings, and one on two nodes where some Python has a trainer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.campaigns import judged, trainers
from tests.campaigns.judged import is_weights
from tests.campaigns.nodes import Namespace, Network, can_isolate
from tests.campaigns.two_nodes import NODES, default_python, has_modules
from tests.support.exhaustive import in_exhaustive
from tests.support.worker_in_process import push_now

LONG = 30
STATE = {"max_steps": 2, "log_history": [{"step": 1, "loss": 2.5}, {"train_runtime": 3.0}]}
NEEDS_ISOLATION = pytest.mark.skipif(
    not can_isolate(), reason="only root may make network namespaces"
)


def model(text: str) -> bytes:
    header = json.dumps({"__metadata__": {"of": text}}).encode()
    return len(header).to_bytes(8, "little") + header


@dataclass
class Trainings:
    """Two that are as they should be: the store has every step, the disk the last one."""

    reference: Path
    ours: Path
    store: Path

    def wrong(self) -> list[str]:
        reference = judged.truths([self.reference], is_weights)
        store = create_store(str(self.store))
        nodes = {name: ["node0"] for name in reference}
        return [
            *judged.missing(judged.locations(store, "out"), nodes),
            *judged.in_store(store, "out", reference, is_weights),
            *judged.on_disk([self.ours], [self.reference], {"checkpoint-1"}),
        ]


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    made = Trainings(tmp_path / "plain" / "out", tmp_path / "out", tmp_path / "store")
    root = made.reference
    for folder in (root, root / "checkpoint-1", root / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(model(folder.name))
        (folder / "config.json").write_text("{}")
        step = int(folder.name[-1]) if folder != root else 2
        (folder / "trainer_state.json").write_text(json.dumps({**STATE, "global_step": step}))
    shutil.copytree(root, made.ours)
    store = create_store(str(made.store))
    for path in (made.ours / "checkpoint-1", made.ours):
        push_now(path, store, "node0", "out")
    shutil.rmtree(made.ours / "checkpoint-1")
    return made


def test_a_training_that_left_all_as_without_us_is_right(trainings: Trainings) -> None:
    assert trainings.wrong() == []


def test_a_flipped_bit_in_the_store_is_seen(trainings: Trainings) -> None:
    stored = trainings.store / "out" / "checkpoint-1" / "model.safetensors"
    stored.write_bytes(model("checkpoint-0"))
    why = "not the bytes that the trainer wrote"
    assert trainings.wrong() == [f"checkpoint-1/model.safetensors: {why}"]


def test_other_losses_are_seen_and_another_runtime_is_not(trainings: Trainings) -> None:
    path = trainings.ours / "checkpoint-2" / "trainer_state.json"
    path.write_text(path.read_text().replace("3.0", "4.0"))
    assert trainings.wrong() == []
    path.write_text(path.read_text().replace("2.5", "2.25"))
    why = "on the disk it is another one than without us"
    assert trainings.wrong() == [f"checkpoint-2/trainer_state.json: {why}"]


def test_files_and_saves_that_lack_or_are_too_many_are_seen(trainings: Trainings) -> None:
    (trainings.ours / "left-by-us").touch()
    (trainings.ours / "config.json").unlink()
    (trainings.reference / "checkpoint-2" / "optimizer.pt").touch()
    store = create_store(str(trainings.store))
    push_now(trainings.ours / "checkpoint-2", store, "node0", "out", name="copy")
    assert sorted(trainings.wrong()) == [
        "checkpoint-2/optimizer.pt: not in the store",
        "checkpoint-2/optimizer.pt: not on the disk",
        "config.json: not on the disk",
        "copy: nobody wrote that",
        "left-by-us: only there with us",
    ]


def test_a_step_that_is_not_in_the_store_of_its_node_is_missed(trainings: Trainings) -> None:
    shutil.rmtree(trainings.store / "out" / ".ckptsync" / "checkpoint-1")
    assert "checkpoint-1: not in the store of node0" in trainings.wrong()


@in_exhaustive
@pytest.mark.skipif(
    not has_modules(default_python(), "torch", "transformers", "accelerate"),
    reason="CKPTSYNC_TEST_TRAINER names no Python with transformers, and this one has it not",
)
def test_every_step_of_a_training_on_two_nodes_is_in_the_store_as_the_framework_gathered_it(
    tmp_path: Path,
) -> None:
    words = ["--modes", "ddp", "--hooks", "hook", "--steps", "3", "--ranks", "1"]
    assert trainers.main([*words, "--home", str(tmp_path)]) == 0


def _reaches(node: Namespace, address: tuple[str, int], patience: float) -> bool:
    """Whether a connection is made within so many seconds.

    A link that is up again carries nothing for a moment, so a failed attempt is made again.
    """
    program = f"import socket; socket.create_connection({address!r}, 1)"
    end = time.monotonic() + patience
    while subprocess.run(
        node.within(sys.executable, "-c", program), capture_output=True, check=False
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
