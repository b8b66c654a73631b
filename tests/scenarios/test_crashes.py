"""Any process may be killed at any moment: it goes on when it is started again, and sends nothing
again that was stored.
"""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest

from tests.scenarios.stores import Store
from tests.scenarios.world import (
    World,
    files_below,
    reference,
)

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
