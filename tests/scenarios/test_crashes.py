"""Any process may be killed at any moment: it goes on when it is started again, and sends nothing again that was stored."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.scenarios.stores import Store
from tests.scenarios.world import BASE, VECTORS, Bits, World, files_below, flipped, reference, tensors

SLOW = "8MB/s"
BALLAST = 12_000_000


@pytest.fixture
def moment() -> float:
    """Seconds until the kill: another one in every run, shown by pytest when the scenario fails."""
    chosen = random.uniform(0.3, 2.0)
    print(f"killed after {chosen:.3f} s")
    return chosen


def identities(store: Store, run: str) -> dict[str, str]:
    """What is stored of a run's own files, and since which write."""
    return {name: store.identity(name) for name in store.names() if name.startswith(f"{run}/") and "/.ckptsync/" not in name}


def is_kept(before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether nothing that was stored was written again, or is gone."""
    return all(after.get(name) == identity for name, identity in before.items())


def test_push_that_was_killed_goes_on(world: World, moment: float) -> None:
    saved = world.save("sft", ballast=BALLAST)
    command = world.start("push", saved, world.store.url, "--bandwidth", SLOW, "--node", "node0")
    time.sleep(moment)
    command.kill()
    before = identities(world.store, "sft")
    world.push(saved)
    assert is_kept(before, identities(world.store, "sft"))
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


def test_a_worker_that_was_killed_goes_on(world: World, moment: float) -> None:
    worker = world.worker(limits={"bandwidth": SLOW})
    saved = world.save("sft", ballast=BALLAST)
    written = files_below(saved)
    worker.wait(phase="sending")
    time.sleep(moment)
    worker.kill()
    before = identities(world.store, "sft")
    shutil.rmtree(saved)  # rotation, while no worker is there
    worker.start()
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert is_kept(before, identities(world.store, "sft"))
    assert world.stored("sft", "checkpoint-4") == written


def test_a_head_that_was_killed_goes_on(world: World, moment: float) -> None:
    world.push_two_nodes("sft", "hf-fsdp2-2node")
    head = world.head(limits={"bandwidth": "200KB/s"})
    time.sleep(moment)
    head.kill()
    head.configure({key: value for key, value in head.configuration.items() if key != "limits"})
    head.start()
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert world.model("sft/checkpoint-4") == reference("hf-fsdp2-2node")


@pytest.mark.stores("path", "s3")
def test_a_verifier_that_was_killed_goes_on(world: World, moment: float) -> None:
    head = world.head()
    world.push(world.save("sft"))
    world.wait("sft/checkpoint-4", "VERIFIED")
    head.kill()
    world.store.write(name := "sft/checkpoint-4/model.safetensors", flipped(world.store.read(name)))
    verifier = world.service(
        "verifier", ["verifier"], {"verify": {"tick": "1s", "period": "1s"}, "limits": {"bandwidth": "50KB/s"}}
    )
    time.sleep(moment)
    verifier.kill()
    verifier.configure({key: value for key, value in verifier.configuration.items() if key != "limits"})
    verifier.start()
    world.wait("sft/checkpoint-4", "DAMAGED")


def test_pull_that_was_killed_goes_on(world: World, tmp_path: Path, moment: float) -> None:
    saved = world.save("sft", ballast=BALLAST)
    world.push(saved)
    words = ("pull", "sft/checkpoint-4", tmp_path / "back", "--store", world.store.url, "--unverified")
    command = world.start(*words, "--bandwidth", SLOW)
    time.sleep(moment)
    command.kill()
    there = tmp_path / "back" / "checkpoint-4"
    assert not there.exists() or files_below(there) == files_below(saved), "half a checkpoint under its name"
    world.run(*words)
    assert files_below(there) == files_below(saved)
    assert [p.name for p in (tmp_path / "back").iterdir() if not p.name.startswith("_")] == ["checkpoint-4"]


@pytest.mark.stores("s3", "sftp")
def test_a_merge_into_a_store_that_was_killed_goes_on(world: World, moment: float) -> None:
    sources = [VECTORS / "hf-fsdp2-2node" / node / "out/checkpoint-4" for node in ("node0", "node1")]
    to = f"{world.store.url}/merged"
    words = ("merge", *sources, to, "--config-from", BASE)
    command = world.start(*words, "--bandwidth", "10KB/s")
    time.sleep(moment)
    assert command.kill().code, "it had ended before"
    world.run(*words)
    made = [name for name in world.store.names() if name.endswith(".safetensors")]
    assert {k: v for name in made for k, v in tensors(world.store.read(name)).items()} == reference("hf-fsdp2-2node")


@pytest.mark.stores("path")
def test_a_merge_that_was_killed_leaves_no_model(world: World, tmp_path: Path, moment: float) -> None:
    source = world.save("big", ballast=0)
    to = tmp_path / "merged"
    command = world.start("merge", source, to)
    time.sleep(moment / 10)
    command.kill()
    if not to.exists():
        world.run("merge", source, to)
    assert _model(to) == reference("hf-ddp")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.stores("path", "s3")
def test_a_worker_that_is_told_to_stop_does_so_soon_and_goes_on_later(world: World, number: int) -> None:
    worker = world.worker(limits={"bandwidth": "1MB/s"})
    saved = world.save("sft", ballast=30_000_000)
    worker.wait(phase="sending")
    worker.signal(number)
    assert worker.ended() == 0
    before = identities(world.store, "sft")
    worker.configure({key: value for key, value in worker.configuration.items() if key != "limits"})
    worker.start()
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert is_kept(before, identities(world.store, "sft"))
    assert world.stored("sft", "checkpoint-4") == files_below(saved)


def _model(folder: Path) -> Bits:
    return {k: v for path in folder.glob("*.safetensors") for k, v in tensors(path.read_bytes()).items()}
