"""What a training logs beside its checkpoints reaches the store, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.world import World, files_below

EVENTS = "runs/Nov28_host/events.out.tfevents.1764300000.host.1.0"


def test_logs_are_carried_as_they_grow_and_come_back(world: World, tmp_path: Path) -> None:
    out = world.output("sft")
    (out / EVENTS).parent.mkdir(parents=True)
    log = out / "trainer_log.jsonl"
    log.write_text('{"step": 1}\n')
    (out / EVENTS).write_bytes(b"\0\1events")
    (out / "secrets.yaml").write_text("token: x\n")
    worker = world.worker()
    world.head()
    world.until_stored("sft/logs/node0/trainer_log.jsonl", log.read_bytes())
    with log.open("a") as file:
        file.write('{"step": 2}\n')
    world.save("sft")
    world.wait("sft/checkpoint-4", "VERIFIED")
    world.until_stored("sft/logs/node0/trainer_log.jsonl", log.read_bytes())
    world.until_stored(f"sft/logs/node0/{EVENTS}", (out / EVENTS).read_bytes())
    old = log.read_bytes()
    worker.kill()
    log.write_text('{"step": 1, "again": true}\n')
    worker.start()
    world.until_stored("sft/logs/node0/trainer_log.jsonl", log.read_bytes())
    pull = ("pull", "sft", tmp_path / "back", "--logs", "--json")
    assert world.at_store(*pull).json["files"] == 3
    back = files_below(tmp_path / "back/logs/node0")
    assert back.pop(EVENTS) == (out / EVENTS).read_bytes()
    assert back.pop(log.name) == log.read_bytes()
    [(name, data)] = back.items()
    assert (name.startswith(f"{log.name}."), data) == (True, old)
    with log.open("a") as file:
        file.write('{"step": 2}\n')
    world.until_stored("sft/logs/node0/trainer_log.jsonl", log.read_bytes())
    assert world.at_store(*pull).json["there"]["files"] == 2
    assert (tmp_path / "back/logs/node0" / log.name).read_bytes() == log.read_bytes()
    world.verify("sft")
    world.at_store("gc", "--orphans")
    assert world.statuses() == {"sft/checkpoint-4": "VERIFIED"}


@pytest.mark.stores("path")
def test_logs_are_not_carried_where_the_configuration_says_so(world: World) -> None:
    world.output("sft").mkdir(parents=True)
    (world.output("sft") / "trainer_log.jsonl").write_text("{}\n")
    world.worker(worker={"logs": False})
    world.let_workers_look("node0")
    assert not [name for name in world.store.names() if "/logs/" in name]
    done = world.at_store("pull", "sft", "back", "--logs", code=2)
    assert "run 'sft' not found" in done.err


@pytest.mark.stores("path")
def test_a_file_that_is_no_copy_of_a_log_is_left_alone(world: World, tmp_path: Path) -> None:
    world.push_save("sft", "hf-ddp")
    pull = ("pull", "sft", tmp_path / "back", "--logs")
    assert "has no logs" in world.at_store(*pull, code=2).err
    world.store.write("sft/logs/node0/trainer_log.jsonl", b"{}\n")
    mine = tmp_path / "back/logs/node0/trainer_log.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine\n")
    assert "has other bytes" in world.at_store(*pull, code=2).out
    assert mine.read_bytes() == b"mine\n"
    mine.unlink()
    world.at_store(*pull, "--dry-run")
    assert not mine.exists()
    world.at_store(*pull)
    assert mine.read_bytes() == b"{}\n"


@pytest.mark.stores("path")
def test_no_new_checkpoint_gets_the_name_of_the_directory_of_logs(world: World) -> None:
    saved = world.save("sft")
    done = world.push(saved, "--as", "logs", code=2)
    assert "logs" in done.err
    assert world.statuses() == {}
