"""A store that is away, full, read-only or refuses its keys: nothing is lost, and the work goes on
when it is well again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.scenarios.stores import Directory
from tests.scenarios.world import World, files_below
from tests.support.sshd import sshd

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
    notes = saved.parent / "_ckptsync/pins/checkpoint-4.0/notes.json"
    world.until(notes.exists, "the worker to have seen the save whole")
    shutil.rmtree(saved)  # rotation goes on meanwhile
    away.rename(world.store.root)
    world.wait("second/checkpoint-4", "COMPLETE")
    assert world.stored("second", "checkpoint-4") == written
    assert worker.is_running()


@root_only
@pytest.mark.stores("path")
def test_a_full_store_is_said_and_gone_on_with(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "6m") as disk:
        (disk / "filler").write_bytes(bytes(4 << 20))
        store = Directory(disk, str(disk), {})
        worker = world.worker(store={"url": store.url})
        saved = world.save("sft", ballast=3_000_000)
        world.until(
            lambda: any("no space" in str(line).lower() for line in worker.lines(phase="failed")),
            "a worker without space to say so",
        )
        (disk / "filler").unlink()
        world.until(lambda: any("/manifest-" in name for name in store.names()), "the manifest")
        assert files_below(disk / "sft/checkpoint-4") == files_below(saved)
        assert worker.is_running()
        told = world.run(
            "status", "--store", disk, "--check", code=1
        )  # there is no room for two more
        assert "store-full" in told.out


@root_only
@pytest.mark.stores("path")
def test_a_read_only_store_can_be_read_and_is_not_written(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    with small_disk(tmp_path / "disk", "16m") as disk:
        world.run("push", saved, "--store", disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert (
            world.run("ls", "--store", disk, "--json").json["locations"][0]["status"] == "COMPLETE"
        )
        world.run("verify", "--store", disk, "--json")
        world.run("pull", "sft/checkpoint-4", tmp_path / "back", "--store", disk, "--unverified")
        assert files_below(tmp_path / "back/checkpoint-4") == files_below(saved)
        done = world.run("push", world.save("other"), "--store", disk, "--json", code=4)
        assert "read-only" in done.error["error"].lower()


@pytest.mark.stores("s3", "sftp")
@pytest.mark.each_store
def test_wrong_keys_end_a_command_and_right_ones_go_on(world: World, tmp_path: Path) -> None:
    saved = world.save("sft")
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong"}
    if world.store.url.startswith("sftp"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "stranger"], check=True
        )
        wrong = {
            "CKPTSYNC_STORAGE_OPTIONS": json.dumps(
                dict(sshd().options_with(key=tmp_path / "stranger"))
            )
        }
    done = world.at_store("push", saved, "--node", "node0", "--json", code=2, environment=wrong)
    assert done.error["hint"]
    assert world.store.names() == []
    world.push(saved)
    assert world.statuses() == {"sft/checkpoint-4": "COMPLETE"}


@pytest.mark.stores("path")
@pytest.mark.parametrize(
    ("name", "shown"), [(b"a\nb", r"'a\nb'"), (b"a\\b", r"'a\\b'"), (b"a\xff", r"'a\udcff'")]
)
def test_a_name_that_no_store_can_keep_is_an_alarm_that_says_what_to_do(
    world: World, name: bytes, shown: str
) -> None:
    path = world.save("sft", 4)
    file = path / os.fsdecode(name)
    file.write_bytes(b"mine")
    world.save("sft", 8, seed=1)
    world.worker()
    world.wait("sft/checkpoint-8", "COMPLETE")

    def alarms() -> list[Mapping[str, str]]:
        return [
            a for a in world.at_store("status", "--json").json["alarms"] if a["code"] == "blocked"
        ]

    world.until(lambda: bool(alarms()), "an alarm")
    [alarm] = alarms()
    assert "sft/checkpoint-4 on node0" in alarm["subject"]
    assert shown in alarm["text"]
    assert "rename" in alarm["todo"]
    assert world.statuses()["sft/checkpoint-4"] == "REFUSED"
    file.rename(path / "notes.txt")
    world.wait("sft/checkpoint-4", "COMPLETE")
    world.until(lambda: not alarms(), "the end of the alarm")
