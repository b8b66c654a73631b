"""The killers see what is wrong, and what deletes checkpoints dies at every moment, in memory.

`make kill-stores`, `kill-heads`, `kill-gc`, `kill-pull`, `kill-merge` and `kill-resume` kill real
processes.
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest

from ckptsync.head.gc import apply_retention
from tests.campaigns import kill
from tests.campaigns.kill_commands import Pulling
from tests.campaigns.kill_gc import Scene, come_again, differences, harm, in_memory, scenes
from tests.campaigns.kill_stores import OLD, SMALL, Writing, location
from tests.campaigns.killing import CHANGING, Trap, can_trap, traps
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import in_exhaustive

SCENES = scenes()


@in_exhaustive
@pytest.mark.skipif(not can_trap(), reason="strace is not installed, or may not trace")
@pytest.mark.parametrize("command", ["pull --stores posix", "merge --stores posix", "resume"])
def test_a_command_killed_at_a_system_call_leaves_nothing_half_and_goes_on(
    command: str, tmp_path: Path
) -> None:
    assert kill.main([*command.split(), "--calls", "3", "--home", str(tmp_path)]) == 0


def test_the_killer_of_pulls_sees_what_is_half_there_late_or_left(tmp_path: Path) -> None:
    victim = Pulling("posix", tmp_path, random.Random(1))
    checkpoint = victim.destination / victim.CHECKPOINT
    shutil.copytree(victim.source, checkpoint)
    assert list(victim.harm()) == [f"{victim.CHECKPOINT} is there without its time"]
    (checkpoint / "ballast.bin").unlink()
    (victim.destination / "latest").write_text("global_step")
    (victim.destination / ".hidden").mkdir()
    wrong = list(victim.harm())
    assert wrong[0] == f"{victim.CHECKPOINT} is there, and is not what it was"
    assert wrong[-1] == "latest says 'global_step'"
    assert list(victim.left()) == [f"there are {['.hidden', victim.CHECKPOINT, 'latest']}"]


def test_the_killer_of_writers_sees_what_is_lost_torn_or_too_much(tmp_path: Path) -> None:
    with location("posix", tmp_path) as directory:
        victim = Writing(directory, tmp_path, SMALL)
        victim.prepare()
        assert list(victim.differences(set())) == []
        lost = "lost, although it was acknowledged, or there before"
        assert list(victim.differences({"run/deep/b"})) == [f"run/deep/b: {lost}"]
        root = Path(directory.url) / "run"
        (root / "deep").mkdir()
        (root / "deep" / "b").write_bytes(SMALL[1].content()[:-1])
        torn = "run/deep/b: 4999 bytes that nobody wrote, 4999 are listed"
        assert list(victim.differences(set())) == [torn]
        (root / "deep" / "b").rename(root / "x")
        assert list(victim.differences(set())) == ["run/x: nobody wrote that"]
        (root / "x").unlink()
        old = "run/a: 70000 bytes that nobody wrote, 70000 are listed"
        assert list(victim.differences({OLD.name})) == [old]
        (root / "a").unlink()
        assert list(victim.differences(set())) == [f"run/a: {lost}"]
        assert list(victim.finish()) == []


def test_traps_are_the_changing_calls_behind_the_mark_counted_for_each_thread() -> None:
    trace = """\
7 write(1, "x"..., 1) = 1
7 access("/mark", F_OK) = -1 ENOENT
7 openat(AT_FDCWD, "/a", O_RDONLY) = 3
7 close(3) = 0
7 openat(AT_FDCWD, "/b", O_WRONLY|O_CREAT, 0666) = 3
8 write(4, "y", 1 <unfinished ...>
7 write(3, "z", 1) = 1
8 <... write resumed>) = 1"""
    expected = [Trap("openat", 2), Trap("write", 1), Trap("write", 2)]
    assert traps(trace.splitlines(), "/mark") == expected
    assert {"write", "fsync", "renameat2", "sendto"} <= CHANGING


@pytest.mark.parametrize("scene", SCENES.values(), ids=lambda scene: scene.name)
def test_where_nobody_dies_nothing_is_harmed_and_it_ends(scene: Scene) -> None:
    store = in_memory({n: data for n, data in scene.files.items() if n not in scene.orphans})
    wrong = [*harm(store, scene), *come_again(store, scene), *harm(store, scene)]
    assert [*wrong, *differences(store, scene)] == []


@in_exhaustive
@pytest.mark.parametrize("name", ["remove", "shards"])
def test_dead_at_every_moment_in_memory_it_harms_nothing_and_the_next_one_ends_it(
    name: str,
) -> None:
    scene = SCENES[name]
    for lives in itertools.count():
        store = in_memory(scene.files)
        try:
            apply_retention(Dying(store, lives), scene.request)
        except Crash:
            wrong = [*harm(store, scene)]
            apply_retention(store, scene.request)
            wrong += [*come_again(store, scene), *harm(store, scene), *differences(store, scene)]
            assert wrong == [], lives
        else:
            assert lives > 5
            return


def test_the_killer_of_gc_sees_what_is_harmed_half_there_and_left() -> None:
    scene = SCENES["remove"]
    model = "run/consolidated/checkpoint-3/model.safetensors"
    for name, told in (
        ("run/checkpoint-4/a.bin", "checkpoint-4: was to be kept, and is not VERIFIED"),
        (model, "checkpoint-3: was to be kept, and is not VERIFIED"),
        ("other/checkpoint-1/b.bin", "other/checkpoint-1/b.bin: of another run"),
    ):
        store = in_memory(scene.files)
        store.delete(name)
        assert told in list(harm(store, scene))
    store = in_memory(SCENES["mark"].files)
    store.delete("run/checkpoint-2/a.bin")
    assert next(harm(store, scene)).startswith("run/checkpoint-2 is INCOMPLETE")
    assert list(come_again(store, scene)) == []
    store.write("run/checkpoint-1/left.bin", [b"x"])
    assert "run/checkpoint-1/left.bin: is left" in list(differences(store, scene))
