"""What an operator does with the services: configure, reload, watch, run two of them, and read
their exit codes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.scenarios.conftest import Prepared
from tests.scenarios.world import COMMAND, VECTORS, World, files_below, flipped
from tests.support.webhook_server import hook


@pytest.mark.stores("path", "s3")
def test_two_heads_make_one_model(world: World) -> None:
    world.push_save("sft", "hf-fsdp2-2node")
    heads = [
        world.head("head0", head={"dtype": "auto"}),
        world.head("head1", head={"dtype": "bf16"}),
    ]
    world.wait("sft/checkpoint-4", "VERIFIED")
    first = world.model("sft/checkpoint-4")
    for head in heads:  # each has looked at it when a checkpoint that came later is done
        head.wait(phase="verified", run="sft")
    world.push(world.save("later"))
    world.wait("later/checkpoint-4", "VERIFIED")
    for head in heads:
        head.wait(phase="verified", run="later")
    assert world.model("sft/checkpoint-4") == first
    assert set(world.statuses().values()) == {"VERIFIED"}
    assert all(head.is_running() for head in heads)
    world.verify("--level", "parse")


@pytest.mark.stores("path")
def test_two_workers_of_one_node_id_are_not_both_at_work(world: World) -> None:
    first = world.worker("node0")
    first.wait(phase="started")
    world.save("sft")
    world.wait("sft/checkpoint-4", "COMPLETE")
    second = world.service("copy", ["worker"], {**first.configuration})
    assert second.ended() == 2
    assert first.is_running()


@pytest.mark.stores("path")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "roles: [worker",
        "roles: [wroker]\nstore: {url: /tmp}\n",
        "\xff\xfe",
        "store: {url: /tmp}\nworker: {runs: [{path: relative}]}\n",
        "a: &a [*a]\n",
    ],
    ids=["empty", "broken", "typo", "no text", "relative", "alias"],
)
def test_a_configuration_that_cannot_be_is_refused_with_2(
    world: World, tmp_path: Path, text: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
    done = world.run("run", "-c", tmp_path / "bad.yaml", code=2)
    assert "bad.yaml" in done.err
    world.run("run", "-c", tmp_path / "nowhere.yaml", code=2)


@pytest.mark.stores("path")
def test_after_sighup_the_next_start_takes_up_a_new_configuration_and_a_bad_one_is_refused(
    world: World,
) -> None:
    worker = world.worker()
    worker.wait(phase="started")
    configuration = worker.configuration
    worker.config.write_text("roles: [wroker]\n")
    worker.signal(signal.SIGHUP)
    worker.wait(phase="not-reloaded")
    assert worker.is_running()
    more = {"path": f"{world.home}/node9/out/*"}
    worker.configure(
        configuration
        | {"worker": configuration["worker"] | {"runs": [*configuration["worker"]["runs"], more]}}
    )
    worker.signal(signal.SIGHUP)
    assert worker.ended() == 0
    worker.start()  # as systemd does
    worker.wait(phase="started")
    world.save("late", node="node9")
    world.save("sft")
    world.wait("late/checkpoint-4", "COMPLETE")
    world.wait("sft/checkpoint-4", "COMPLETE")
    assert worker.is_running()


@pytest.mark.stores("path")
def test_exit_codes_say_what_to_do(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    world.run("--help")
    world.run("merge", "--help")
    world.run("no-such-command", code=2)
    world.at_store("push", tmp_path / "nothing", code=2)
    world.run("ls", "--store", "ftp9://nowhere/x", code=2)
    world.push(saved)
    world.at_store("pull", "sft/checkpoint-9", tmp_path / "back", code=2)
    world.run("inspect", VECTORS / "hf-fsdp2-2node/node0/out/checkpoint-4", code=3)
    (tmp_path / "megatron/mp_rank_00").mkdir(parents=True)
    (tmp_path / "megatron/mp_rank_00/model_optim_rng.pt").write_bytes(b"PK")
    world.run("merge", tmp_path / "megatron", tmp_path / "out", code=5)
    away = {
        "CKPTSYNC_STORAGE_OPTIONS": (
            '{"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}'
        )
    }
    world.run(
        "ls",
        "--store",
        "s3://bucket/store",
        code=4,
        environment={**away, "CKPTSYNC_LIMITS_PATIENCE": "1s"},
    )
    world.store.write(name := "sft/checkpoint-4/model.safetensors", flipped(world.store.read(name)))
    world.at_store("verify", code=10)


@pytest.mark.stores("path")
def test_a_reader_that_leaves_is_no_error(world: World, prepared: Prepared) -> None:
    world.fill(prepared("hf-ddp", 4))
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [*COMMAND, "ls", "--store", world.store.url],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=world.environment,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.stores("path")
def test_damage_is_told_by_apprise_and_to_a_command(world: World, prepared: Prepared) -> None:
    world.fill(prepared("hf-ddp", 4))
    world.store.write(
        name := "sft/checkpoint-4/trainer_state.json", flipped(world.store.read(name))
    )
    told = world.home / "told"
    command = ["/bin/sh", "-c", f"cat >> '{told}'"]
    with hook() as web:
        # another alarm would come first, and a channel rests for a minute after each message
        alerts = {"urls": [web.json_url()], "command": command, "on": ["damage"]}
        world.head(alerts=alerts, verify={"period": "2s"})
        assert "damaged: sft/checkpoint-4" in web.next()["message"]
        world.until(lambda: "damaged sft/checkpoint-4" in told.read_text(), "the command's alert")


@pytest.mark.stores("s3")
def test_a_refused_key_ends_no_service_that_has_worked(world: World) -> None:
    credentials = world.home / "credentials"
    env = world.environment
    right = (
        f"[default]\naws_access_key_id={env['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key={env['AWS_SECRET_ACCESS_KEY']}\n"
    )
    wrong = right.replace("aws_secret_access_key=", "aws_secret_access_key=not")
    credentials.write_text(wrong)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        world.environment.pop(key)
    world.environment["AWS_SHARED_CREDENTIALS_FILE"] = str(credentials)
    services = [world.worker(), world.head()]
    assert [service.ended() for service in services] == [
        2,
        2,
    ], "a key that never worked is a mistake in the configuration"
    credentials.write_text(right)
    for service in services:
        service.start()
    world.save("first")
    world.wait("first/checkpoint-4", "VERIFIED")
    credentials.write_text(wrong)
    for service in services:
        service.kill()
        service.start()
        service.wait(phase="waiting")
        assert service.is_running()
    saved = world.save("second")
    credentials.write_text(right)
    world.wait("second/checkpoint-4", "VERIFIED")
    assert world.stored("second", "checkpoint-4") == files_below(saved)


@pytest.mark.stores("path")
@pytest.mark.parametrize(
    "name", ["..", ".hidden", "_ours", "consolidated", "a b", "ü", "x" * 200, "new\nline", "-rf"]
)
def test_odd_names_of_runs_do_no_harm(world: World, name: str) -> None:
    if name == "..":
        world.at_store("push", world.save("sft"), "--run", name, code=2)
        assert not [n for n in world.store.names() if n != ".ckptsync/store.json"]
        return
    saved = world.save(name)
    done = world.finish("push", saved, "--store", world.store.url, "--node", "node0")
    assert done.code in (0, 2)
    listed = world.statuses()
    assert (list(listed.values()) == ["COMPLETE"]) == (done.code == 0)
    assert {path.name for path in world.home.iterdir()} <= {"store", "node0", "cache", ".cache"}
