"""A store that is away, full, read-only or refuses its keys: nothing is lost, and the work goes on when it is well again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.stores import Directory
from tests.scenarios.world import World, files_below
from tests.sshd import another_sshd

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of so many bytes."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@pytest.mark.stores("path")
def test_a_store_that_is_away_is_waited_for(world: World, tmp_path: Path) -> None:
    assert isinstance(world.store, Directory)
    worker = world.worker()
    world.save("first")
    world.wait("first/checkpoint-4", "COMPLETE")
    away = tmp_path / "away"
    world.store.root.rename(away)
    saved = world.save("second")
    written = files_below(saved)
    worker.wait(phase="failed", run="second")
    shutil.rmtree(saved)  # rotation goes on meanwhile
    away.rename(world.store.root)
    world.wait("second/checkpoint-4", "COMPLETE")
    assert world.stored("second", "checkpoint-4") == written
    assert worker.is_running()


@pytest.mark.stores("path")
def test_a_server_that_is_away_is_waited_for(world: World, tmp_path: Path) -> None:
    with another_sshd() as server:
        remote = tmp_path / "remote"
        remote.mkdir()
        store = Directory(remote, server.url(remote), {})
        options = dict(server.options)
        worker = world.worker(store={"url": store.url, "options": options})
        world.save("first")
        world.until(lambda: any("manifest-" in name for name in store.names()), "the first checkpoint's manifest")
        server.stop()
        for process in _sessions(server.port):
            os.kill(process, 9)
        saved = world.save("second")
        server.start()
        world.until(lambda: any(n.startswith("second/.ckptsync/checkpoint-4/manifest-") for n in store.names()), "the second's")
        assert files_below(remote / "second/checkpoint-4") == files_below(saved)
        assert worker.is_running()


@root_only
@pytest.mark.stores("path")
def test_a_full_store_is_said_and_gone_on_with(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "6m") as disk:
        (disk / "filler").write_bytes(bytes(4 << 20))
        store = Directory(disk, str(disk), {})
        worker = world.worker(store={"url": store.url})
        saved = world.save("sft", ballast=3_000_000)
        world.until(lambda: "no space" in _errors(world, disk), "a worker that says that there is no space")
        (disk / "filler").unlink()
        world.until(lambda: any("manifest-" in name for name in store.names()), "the manifest")
        assert files_below(disk / "sft/checkpoint-4") == files_below(saved)
        assert worker.is_running()


@root_only
@pytest.mark.stores("path")
def test_a_read_only_store_can_be_read_and_is_not_written(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    with small_disk(tmp_path / "disk", "16m") as disk:
        world.run("push", saved, disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert world.run("ls", disk, "--json").json["places"][0]["word"] == "COMPLETE"
        world.run("verify", disk, "--json")
        world.run("pull", "sft/checkpoint-4", tmp_path / "back", "--store", disk, "--unverified")
        assert files_below(tmp_path / "back/checkpoint-4") == files_below(saved)
        done = world.run("push", world.save("other"), disk, "--json", code=4)
        assert "read-only" in done.error["error"].lower()


@pytest.mark.stores("s3")
def test_wrong_keys_end_a_command_and_right_ones_go_on(world: World) -> None:
    saved = world.save("sft")
    done = world.run("push", saved, world.store.url, "--json", code=2, environment={"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert done.error["hint"]
    assert world.store.names() == []
    world.push(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("sftp")
def test_a_host_that_nobody_knows_is_refused(world: World, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    options = world.environment["CKPTSYNC_STORAGE_OPTIONS"].replace("known_hosts", "unknown_hosts")
    done = world.run("ls", world.store.url, "--json", code=2, environment={"CKPTSYNC_STORAGE_OPTIONS": options})
    assert "key" in done.error["error"] + done.error["hint"]


def _errors(world: World, store: Path) -> str:
    """What the nodes of a store say that fails."""
    if not (store / ".ckptsync/nodes").is_dir():
        return ""
    told = world.run("status", store, "--json").json
    return " ".join(str(alarm["code"]) + str(alarm["text"]) for alarm in told["alarms"]).lower().replace("-", " ")


def _sessions(port: int) -> list[int]:
    """Processes that serve a connection of that sshd."""
    found = subprocess.run(["pgrep", "-f", "sshd: .*@notty|sshd-session"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()] if found.returncode == 0 and port else []
