"""What a user mistypes, or sets twice, is told; what a message names is there."""

from __future__ import annotations

import shlex

import pytest
import yaml

from tests.scenarios.world import World


@pytest.mark.stores("path")
def test_a_variable_that_beats_the_file_is_told_without_its_secrets(world: World) -> None:
    other = world.home / "other"
    service = world.service(
        "node0",
        ["worker"],
        {"alerts": {"urls": ["jsons://h/geheim"]}, **runs(world)},
        starts=False,
    )
    overrides = {"CKPTSYNC_STORE": str(other), "CKPTSYNC_ALERTS_URLS": "jsons://h/geheimer"}
    service.start(overrides)
    told = service.wait(phase="starting")
    assert told["store"] == str(other)
    assert all(
        word in told["overridden"]
        for word in ("store.url", world.store.url, "CKPTSYNC_STORE", "CKPTSYNC_ALERTS_URLS")
    )
    service.wait(phase="started")
    done = world.run("ls", "-c", service.config, environment=overrides)
    assert all(
        word in done.err for word in ("store.url", world.store.url, "CKPTSYNC_STORE", str(other))
    )
    assert "geheim" not in done.err + service.text()


def test_init_writes_a_configuration_with_which_a_service_runs(world: World) -> None:
    save = world.save("sft")
    options = ["--role", "both", "--store", world.store.url, "--output-dir", save.parent]
    done = world.run("init", "new.yaml", *options)
    assert "next: ckptsync run -c new.yaml" in done.out
    assert "retention is off" in done.out
    text = (world.home / "new.yaml").read_text()
    assert 6 <= len(text.splitlines()) <= 12
    assert "valid: worker, head, verifier" in world.run("config", "check", "new.yaml").out
    shown = world.run("config", "show", "new.yaml", "--json").json["keys"]
    assert shown["store.url"] == {"value": world.store.url, "source": "new.yaml:4"}
    assert shown["worker.quiet"] == {"value": "10s", "source": "default"}
    world.run("init", "new.yaml", *options, code=2)
    assert (world.home / "new.yaml").read_text() == text, "it was overwritten"
    service = world.start("run", "-c", "new.yaml", environment={"CKPTSYNC_WORKER_QUIET": "1s"})
    try:
        world.until(lambda: any("sft/checkpoint" in name for name in world.store.names()), "upload")
    finally:
        service.kill()


@pytest.mark.stores("path")
def test_init_refuses_what_it_cannot_know_and_what_no_service_could_read(world: World) -> None:
    for options in (
        ["--store", world.store.url],
        ["--role", "head"],
        ["--role", "worker", "--store", world.store.url],
        ["--role", "head", "--store", "s3:/bucket"],
        ["--role", "head", "--store", "~no-such-user/store"],
        ["--role", "head", "--store", " "],
        ["--role", "head", "--store", world.store.url, "--output-dir", "out"],
        ["--role", "head", "--store", "s3://key:secret@bucket"],
    ):
        done = world.run("init", "new.yaml", *options, code=2)
        assert "secret" not in done.err
        assert not (world.home / "new.yaml").exists()


@pytest.mark.stores("path")
def test_config_shows_names_as_they_are_and_hints_that_a_shell_understands(world: World) -> None:
    options = ["--role", "both", "--store", world.store.url, "--output-dir", "检查点"]
    world.run("init", "the new.yaml", *options)
    assert "ckptsync doctor -c 'the new.yaml'" in world.run("config", "check", "the new.yaml").out
    assert "检查点" in world.run("config", "show", "the new.yaml").out


@pytest.mark.stores("path", "sftp")
def test_a_mistyped_store_is_not_made_and_a_new_one_is_said(world: World) -> None:
    save = world.save("sft")
    done = world.run(
        "push", save, "--store", f"{world.store.url}/mistyped/store", "--node", "node0", code=2
    )
    assert "mistyped" in done.err
    assert not [name for name in world.store.names() if "mistyped" in name]
    assert world.store.url in world.push(save).err, "nothing says that a store was made, and where"
    assert world.store.url not in world.push(save).err


@pytest.mark.stores("path")
def test_output_directories_that_match_nothing_are_told_in_the_log_and_in_status(
    world: World,
) -> None:
    service = world.service(
        "node0",
        ["worker"],
        {"worker": {"runs": [{"path": f"{world.home}/none/*"}], "scan_every": "1s"}},
    )
    assert service.wait(phase="no-directory")["level"] == "warning"
    service.wait(phase="started")
    world.until(
        lambda: f"{world.home}/none/*" in world.at_store("status").out,
        "status to tell of it",
    )


@pytest.mark.stores("path")
def test_the_commands_that_hints_name_print_what_they_say(world: World) -> None:
    hint = world.run("run", "-c", world.home / "nowhere.yaml", "--json", code=2).error["hint"]
    command = next(part for part in hint.split("`") if part.startswith("ckptsync "))
    words = [*shlex.split(command)[1:], "--role", "head", "--store", world.store.url]
    world.run(*words)
    assert yaml.safe_load((world.home / "FILE").read_text())["store"]["url"] == world.store.url
    assert "CKPTSYNC_STORE" in world.run("help", "cli").out


def runs(world: World) -> dict[str, object]:
    """A worker's output directory that is there."""
    world.output("sft").mkdir(parents=True)
    return {"worker": {"runs": [{"path": f"{world.home}/node0/out/*"}], "scan_every": "1s"}}
