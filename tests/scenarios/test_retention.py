"""Checkpoints that no rule keeps go, after a grace.

The last verified one and what a person keeps never do.
"""

from __future__ import annotations

import time

import pytest

from tests.scenarios.world import BASE, World, dated


def locations(world: World) -> dict[str, str]:
    return {
        name.removeprefix("sft/checkpoint-"): status for name, status in world.statuses().items()
    }


@pytest.mark.stores("path")
def test_a_head_with_rules_does_it_by_itself_and_workers_send_nothing_again(world: World) -> None:
    world.worker()
    head = world.head(retention={"keep_last": 1, "grace": "1s"})
    for seed, step in enumerate((1, 2)):
        world.save("sft", step=step, seed=seed)
        world.wait(f"sft/checkpoint-{step}", "VERIFIED")
    head.stop()  # a head looks for what is to go at its start, and then every ten minutes
    head.start()
    world.wait("sft/checkpoint-1", "RETIRED")
    head.stop()
    time.sleep(1)
    head.start()
    world.until(
        lambda: not [n for n in world.store.names() if n.startswith("sft/checkpoint-1/")],
        "the old one to go",
    )
    world.let_workers_look("node0")
    assert not [name for name in world.store.names() if name.startswith("sft/checkpoint-1/")]
    assert locations(world)["2"] == "VERIFIED"


@pytest.mark.stores("path")
@pytest.mark.parametrize(("wrong", "days"), [(2, 30), (4, -30)])
def test_a_save_with_a_wrong_clock_is_no_newer_and_no_older_than_its_step(
    world: World, wrong: int, days: float
) -> None:
    for step in (1, 2, 3, 4):
        path = world.save("sft", step=step, seed=step)
        if step == wrong:
            dated(path, time.time() + days * 86400)
        world.push(path)
    world.at_store("consolidate", "--config-from", BASE)
    world.verify()
    assert set(locations(world).values()) == {"VERIFIED"}
    alarms = world.at_store("status", "--json").json["alarms"]
    assert [(a["code"], a["subject"]) for a in alarms] == [("clock", f"sft/checkpoint-{wrong}")]
    assert "dated 30d" in alarms[0]["text"] or "dated 29d23h" in alarms[0]["text"]
    assert world.at_store("status", "--json").json["runs"][0]["newest"]["step"] == 4
    world.at_store("pull", "sft", world.home / "got")
    assert [p.name for p in (world.home / "got").iterdir()] == ["checkpoint-4"]
    for _ in range(2):
        world.at_store("gc", "--keep-last", "1", "--grace", "0s")
    assert locations(world) == {"4": "VERIFIED"}
