"""Any process may be killed at any moment: it goes on when it is started again, and sends nothing
again that was stored.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from tests.scenarios.conftest import Prepared
from tests.scenarios.stores import Store
from tests.scenarios.world import (
    Command,
    World,
    files_below,
    flipped,
    reference,
)
from tests.support.exhaustive import in_exhaustive

SLOW = "8MB/s"
BALLAST = 12_000_000


@pytest.fixture
def moment() -> float:
    """Seconds from the first sign of work to the kill: another one in every run, shown by pytest
    when the scenario fails.
    """
    chosen = random.uniform(0.0, 1.5)
    print(f"killed {chosen:.3f} s after it had begun")
    return chosen


def killed(world: World, command: Command, has_begun: Callable[[], bool], moment: float) -> None:
    """Kill a command that has begun its work; where it is quick it may have ended."""
    world.until(lambda: has_begun() or not command.is_running(), "a command to begin its work")
    time.sleep(moment)
    command.kill()


def identities(store: Store, run: str) -> dict[str, str]:
    """What is stored of a run's own files, and since which write."""
    return {
        name: store.identity(name)
        for name in store.names()
        if name.startswith(f"{run}/") and "/.ckptsync/" not in name
    }


def is_kept(before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether nothing that was stored was written again, or is gone."""
    return all(after.get(name) == identity for name, identity in before.items())


@pytest.mark.each_store
def test_push_that_was_killed_goes_on(world: World, moment: float) -> None:
    saved = world.save("sft", ballast=BALLAST)
    command = world.start(
        "push", saved, "--store", world.store.url, "--bandwidth", SLOW, "--node", "node0"
    )
    killed(world, command, lambda: bool(identities(world.store, "sft")), moment)
    before = identities(world.store, "sft")
    world.push(saved)
    assert is_kept(before, identities(world.store, "sft"))
    assert world.stored("sft", "checkpoint-4") == files_below(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.each_store
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
    world.push_save("sft", "hf-fsdp2-2node")
    head = world.head(limits={"bandwidth": "200KB/s"})
    world.until(
        lambda: any("/agreement-" in name for name in world.store.names()), "a head to begin"
    )
    time.sleep(moment)
    head.kill()
    before = identities(world.store, "sft")
    head.configure({key: value for key, value in head.configuration.items() if key != "limits"})
    head.start()
    world.wait("sft/checkpoint-4", "VERIFIED")
    assert is_kept(before, identities(world.store, "sft"))
    assert world.model("sft/checkpoint-4") == reference("hf-fsdp2-2node")


@pytest.mark.stores("path", "s3")
def test_a_verifier_that_was_killed_goes_on(
    world: World, prepared: Prepared, moment: float
) -> None:
    world.fill(prepared("hf-ddp", 4))
    world.store.write(name := "sft/checkpoint-4/model.safetensors", flipped(world.store.read(name)))
    verifier = world.service(
        "verifier",
        ["verifier"],
        {"verify": {"tick": "1s", "period": "1s"}, "limits": {"bandwidth": "50KB/s"}},
    )
    verifier.wait(phase="started")
    time.sleep(moment)
    verifier.kill()
    verifier.configure(
        {key: value for key, value in verifier.configuration.items() if key != "limits"}
    )
    verifier.start()
    world.wait("sft/checkpoint-4", "DAMAGED")


@pytest.mark.stores("path")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_command_that_is_told_to_stop_says_so_by_its_exit_code_and_is_gone_on_with(
    world: World, number: signal.Signals
) -> None:
    saved = world.save("sft", ballast=BALLAST)
    command = world.start(
        "push", saved, "--store", world.store.url, "--bandwidth", "200KB/s", "--node", "node0"
    )
    world.until(lambda: bool(identities(world.store, "sft")), "a push to begin its work")
    done = command.told(number)
    assert done.code == 128 + number, done.err
    assert "Traceback" not in done.err
    before = identities(world.store, "sft")
    world.push(saved)
    assert is_kept(before, identities(world.store, "sft"))
    assert world.stored("sft", "checkpoint-4") == files_below(saved)


@pytest.mark.parametrize(
    ("store", "number"),
    [
        ("path", signal.SIGTERM),
        pytest.param("s3", signal.SIGTERM, marks=in_exhaustive),
        pytest.param("sftp", signal.SIGTERM, marks=in_exhaustive),
        ("path", signal.SIGINT),
    ],
    ids=["path-SIGTERM", "s3-SIGTERM", "sftp-SIGTERM", "path-SIGINT"],
    indirect=["store"],
)
def test_a_worker_that_is_told_to_stop_does_so_soon_and_goes_on_later(
    world: World, number: int
) -> None:
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
