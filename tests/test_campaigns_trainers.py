"""The judge of real trainings, and one of each program where this Python, or another, has it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.campaigns import released, trainers
from tests.campaigns.nodes import Namespace, Network, can_isolate
from tests.campaigns.released import PLAIN, Run, Trl
from tests.campaigns.two_nodes import NODES, can_train, default_python, has_modules
from tests.support.exhaustive import in_exhaustive
from tests.support.worker_in_process import push_now

LONG = 30
RUN, REFERENCE = Run("sft", "hook"), Run("sft", PLAIN)
STATE = {"max_steps": 2, "log_history": [{"step": 1, "loss": 2.5}, {"train_runtime": 3.0}]}
NEEDS_ISOLATION = pytest.mark.skipif(
    not can_isolate(), reason="only root may make network namespaces"
)


def model(text: str) -> bytes:
    header = json.dumps({"__metadata__": {"of": text}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.fixture
def program(tmp_path: Path) -> Trl:
    """Two trainings that are as they should be: the store has every step, the disk the last one."""
    program = Trl(tmp_path, "python", 2)
    root = program.out(REFERENCE)
    for folder in (root, root / "checkpoint-1", root / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(model(folder.name))
        (folder / "config.json").write_text("{}")
        step = int(folder.name[-1]) if folder != root else 2
        (folder / "trainer_state.json").write_text(json.dumps({**STATE, "global_step": step}))
    shutil.copytree(root, program.out(RUN))
    store = create_store(str(program.store(RUN)))
    for path in (program.out(RUN) / "checkpoint-1", program.out(RUN)):
        push_now(path, store, "node0", "out")
    shutil.rmtree(program.out(RUN) / "checkpoint-1")
    return program


def wrong(program: Trl) -> list[str]:
    return [*released.unsent(program, RUN), *released.differing(program, RUN)]


def test_a_training_that_left_all_as_without_us_is_right(program: Trl) -> None:
    assert wrong(program) == []


def test_a_flipped_bit_in_the_store_is_seen(program: Trl) -> None:
    stored = program.store(RUN) / "out" / "checkpoint-1" / "model.safetensors"
    stored.write_bytes(model("checkpoint-0"))
    assert wrong(program) == [
        "checkpoint-1/model.safetensors: not the bytes that the trainer wrote"
    ]


def test_other_losses_are_seen_and_another_runtime_is_not(program: Trl) -> None:
    path = program.out(RUN) / "checkpoint-2" / "trainer_state.json"
    path.write_text(path.read_text().replace("3.0", "4.0"))
    assert wrong(program) == []
    path.write_text(path.read_text().replace("2.5", "2.25"))
    assert wrong(program) == [
        "checkpoint-2/trainer_state.json: on the disk it is another one than without us"
    ]


def test_files_and_saves_that_lack_or_are_too_many_are_seen(program: Trl) -> None:
    (program.out(RUN) / "left-by-us").touch()
    (program.out(RUN) / "config.json").unlink()
    (program.out(REFERENCE) / "checkpoint-2" / "optimizer.pt").touch()
    store = create_store(str(program.store(RUN)))
    push_now(program.out(RUN) / "checkpoint-2", store, "node0", "out", name="copy")
    assert sorted(wrong(program)) == [
        "checkpoint-2/optimizer.pt: not in the store",
        "checkpoint-2/optimizer.pt: not on the disk",
        "config.json: not on the disk",
        "copy: nobody wrote that",
        "left-by-us: only there with us",
    ]


def test_a_step_that_is_not_in_the_store_of_its_node_is_missed(program: Trl) -> None:
    shutil.rmtree(program.store(RUN) / "out" / ".ckptsync" / "checkpoint-1")
    assert "checkpoint-1: not in the store of node0" in wrong(program)


@in_exhaustive
@pytest.mark.skipif(
    not can_train(default_python()),
    reason="CKPTSYNC_TEST_TRAINER names no Python with transformers, and this one has it not",
)
def test_every_step_of_a_training_on_two_nodes_is_in_the_store_as_the_framework_gathered_it(
    tmp_path: Path,
) -> None:
    words = ["--modes", "ddp", "--hooks", "hook", "--steps", "3", "--ranks", "1"]
    assert trainers.main([*words, "--home", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("program", "way", "hook"),
    [("llamafactory", "single", "autoload"), ("trl", "sft", "hook"), ("ray", "ddp", "hook")],
)
def test_a_trainer_as_it_was_released_trains_with_the_hook_and_nothing_is_lost(
    tmp_path: Path, program: str, way: str, hook: str
) -> None:
    python = default_python(program.upper())
    if not has_modules(python, *released.PROGRAMS[program].needs):
        pytest.skip(f"CKPTSYNC_TEST_{program.upper()} names no Python with it, nor has this one it")
    words = [program, "--ways", way, "--hooks", hook, "--steps", "2", "--python", python]
    assert released.main([*words, "--home", str(tmp_path)]) == 0


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
