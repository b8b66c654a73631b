"""Events of a head: commands for what happens to checkpoints, also when heads are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.world import Service, World

METRIC = """echo '{"eval/acc": 0.71}'"""


def event(script: str, *words: object) -> dict[str, Any]:
    command = ["/bin/sh", "-c", script, "sh", *map(str, words)]
    return {"name": "eval", "on": ["verified"], "runs": "sft", "command": command}


def heads(world: World, script: str, *names: str) -> list[Service]:
    """Heads of a store that is there, and that remembers that they have the event."""
    world.push(world.save("first"))
    started = [
        world.head(name, events=[event(script, "{location}")], verify={"level": "digest"})
        for name in names
    ]
    world.until(lambda: any("eval/verified.since" in n for n in world.store.names()), "the event")
    return started


def events(world: World) -> list[dict[str, Any]]:
    told = world.at_store("events", "sft", "--json").json["events"]
    return [row for row in told if row["name"]]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.stores("path")
def test_two_heads_run_an_event_once_for_each_checkpoint_and_its_metrics_are_shown(
    world: World, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    script = f"echo $1 >>{told}; sleep 1; {METRIC}"
    started = heads(world, script, "head0", "head1")
    for step in (4, 5):
        world.push(world.save("sft", step))
    done = {f"checkpoint-{step}" for step in (4, 5)}
    world.until_told(
        lambda: {e["location"] for e in events(world) if e["outcome"] == "done"} == done, "all done"
    )
    assert sorted(lines(told)) == sorted(done)
    row = world.ls()["sft/checkpoint-5"]
    full = world.at_store("ls", "sft/checkpoint-5")
    assert row["status"] == "VERIFIED"
    assert "eval/acc" in full.out
    [one] = world.at_store("ls", "sft/checkpoint-5", "--json").json["locations"]
    assert one["metrics"] == {"eval/acc": 0.71}
    assert all(head.is_running() for head in started)


@pytest.mark.stores("path")
def test_an_event_whose_head_was_killed_is_run_by_the_next_one(
    world: World, tmp_path: Path
) -> None:
    told, go = tmp_path / "told", tmp_path / "go"
    script = f"echo $$ >>{told}; while ! test -e {go}; do sleep 0.1; done; {METRIC}"
    [head] = heads(world, script, "head")
    world.push(world.save("sft"))
    world.until(lambda: bool(lines(told)), "a command")
    head.kill()
    pid = int(lines(told)[-1])
    world.until(lambda: not is_running(pid), "its command to die")
    head.start()
    world.until(lambda: len(lines(told)) >= 2, "another command")
    go.touch()
    world.until_told(lambda: [e["outcome"] for e in events(world)] == ["done"], "it to be done")
    world.push(world.save("sft", 5))
    world.until_told(lambda: len(events(world)) == 2, "the next one to be done")
    assert len(lines(told)) >= 3


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.stores("path")
def test_what_fails_is_shown_with_its_reason_and_the_time_of_the_next_try(
    world: World, tmp_path: Path
) -> None:
    fixed = tmp_path / "fixed"
    [head] = heads(world, f"echo 'no GPU' >&2; test -e {fixed}", "head")
    world.push(world.save("sft"))
    head.wait(phase="failed")

    def failed() -> list[dict[str, Any]]:
        told = world.at_store("status", "--json").json["running"]
        return [e for e in told if e["kind"] == "event" and e["state"] == "failed"]

    entry: dict[str, Any] = {}

    def is_shown() -> bool:
        for told in failed():
            entry.update(told)
        return bool(entry)

    world.until_told(is_shown, "status to show it")
    assert (entry["name"], entry["location"]) == ("eval (verified)", "checkpoint-4")
    assert "ended with status 1: no GPU" in entry["reason"]
    assert entry["until"] > entry["since"]
    [row] = events(world)
    assert row["outcome"] == "failed"
    assert row["failures"] >= 1
    fixed.touch()
    by_hand = ("events", "run", "sft/checkpoint-4", "eval", "-c", head.config)
    assert "done in" in world.run(*by_hand).out
    world.until_told(lambda: not failed(), "status to forget it")


@pytest.mark.stores("path")
def test_a_store_that_is_away_while_a_command_runs_gets_its_record_later(
    world: World, tmp_path: Path
) -> None:
    told, go = tmp_path / "told", tmp_path / "go"
    script = f"echo x >>{told}; while ! test -e {go}; do sleep 0.1; done; {METRIC}"
    [head] = heads(world, script, "head")
    world.push(world.save("sft"))
    world.until(lambda: bool(lines(told)), "the command")
    root, away = Path(world.store.url), tmp_path / "away"
    root.rename(away)
    size = len(head.text())
    world.until(lambda: len(head.text()) > size, "the head to see that")
    go.touch()
    away.rename(root)
    world.until_told(lambda: [e["outcome"] for e in events(world)] == ["done"], "it to be done")
    assert head.is_running()
