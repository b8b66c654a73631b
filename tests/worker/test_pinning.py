"""How pins follow their source, which give way when the spool is full, and what one scan sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.checkpoint_dirs import ListedCheckpoint
from ckptsync.spool.markers import Commit, PinNotes
from ckptsync.spool.pins import Pin, list_pins, mark_stored
from ckptsync.walk import Stat
from ckptsync.worker.local_save import LocalSave
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import PinChanges, Pinner, follow_source
from ckptsync.worker.results import Failure
from ckptsync.worker.scanner import Scan, list_and_pin_saves
from ckptsync.worker.spool_room import (
    PinCost,
    Relief,
    SpoolRoom,
    SpoolRule,
    choose_to_give_up,
    held_bytes,
)
from tests.support.hook_pins import commit as commit_pin
from tests.support.worker_in_process import ONE, lay, other


def files(told: dict[str, int]) -> tuple[Stat, ...]:
    """A name and its inode; another inode is another time, too."""
    return tuple(Stat(n, 1, inode, inode, 0) for n, inode in told.items())


def make_listing(**told: int) -> ListedCheckpoint:
    return ListedCheckpoint("checkpoint-4", "trainer", Path("x"), files(told), (), ())


def pin(k: int, node: str = "n0", **told: int) -> Pin:
    return Pin("checkpoint-4", k, node, 0, Path(str(k)), files(told))


def test_what_is_seen_first_is_pinned_and_grows() -> None:
    assert follow_source(make_listing(a=1), [], "n0") == PinChanges(new_k=0)
    assert follow_source(make_listing(a=1), [pin(0)], "n0") == PinChanges(linked=("a",))
    assert follow_source(make_listing(a=1, b=2), [pin(0, a=1)], "n0") == PinChanges(linked=("b",))
    assert follow_source(make_listing(a=1), [pin(0, a=1)], "n0") == PinChanges()


def test_rotation_takes_nothing_from_a_pin() -> None:
    ours = pin(0, a=1, b=2)
    assert follow_source(make_listing(a=1), [ours], "n0") == PinChanges()
    assert follow_source(make_listing(), [ours], "n0") == PinChanges()
    assert follow_source(None, [ours], "n0") == PinChanges()


def test_a_placeholder_that_the_trainer_took_back_is_let_go() -> None:
    ours = pin(0, config=1, model=2)
    assert follow_source(make_listing(config=1, shard=3), [ours], "n0") == PinChanges(
        unlinked=("model",), linked=("shard",)
    )


def test_a_directory_made_again_is_another_pin_even_if_it_begins_with_a_new_name() -> None:
    ours = pin(0, a=1, b=2)
    assert follow_source(make_listing(rng=9), [ours], "n0") == PinChanges(new_k=1)
    assert follow_source(make_listing(a=8, b=9), [ours], "n0") == PinChanges(new_k=1)


def finished(one: Pin) -> Pin:
    return replace(one, notes=PinNotes(finished=1))


def test_a_save_written_over_a_finished_one_is_another_pin_and_the_finished_one_stays() -> None:
    ours = pin(0, a=1, b=2)
    assert follow_source(make_listing(a=1, b=9), [finished(ours)], "n0") == PinChanges(new_k=1)
    assert follow_source(make_listing(a=1, b=9), [ours], "n0") == PinChanges((ours,), new_k=1)


def test_only_the_newest_pin_follows_and_another_nodes_is_let_be() -> None:
    assert follow_source(make_listing(a=9), [pin(0, a=1), pin(1, a=9)], "n0") == PinChanges()
    assert follow_source(make_listing(a=9), [pin(0, "n1", a=1)], "n0") == PinChanges()


def commit(k: int, **told: int) -> Pin:
    """A pin that the hook committed."""
    sizes = {f.path: (f.size, f.mtime) for f in files(told)}
    record = Commit("t", "s", "checkpoint-4", 4, 1, (0,), "h", "hf", 0.0, sizes)
    return replace(pin(k, "n0", **told), commit=record)


def test_what_the_hook_committed_neither_grows_nor_shrinks() -> None:
    committed = [commit(0, a=1, b=2)]
    for source in (make_listing(a=1, b=2), make_listing(a=1)):
        assert follow_source(source, committed, "n0") == PinChanges()
    for source in (make_listing(a=1, b=2, c=3), make_listing(a=1, b=9), make_listing(b=9)):
        assert follow_source(source, committed, "n0") == PinChanges(new_k=1)


@pytest.mark.parametrize(
    "told", [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 7}, {"a": 1, "placeholder": 7}], ids=str
)
def test_what_was_pinned_of_a_save_before_the_hook_committed_it_goes(told: dict[str, int]) -> None:
    ours, committed = pin(0, "n0", **told), commit(1, a=1, b=2)
    for source in (make_listing(a=1, b=2), make_listing(), None):
        assert follow_source(source, [ours, committed], "n0") == PinChanges((ours,))
    others = [replace(ours, node="n1"), committed]
    assert follow_source(make_listing(a=1, b=2), others, "n0") == PinChanges()


@pytest.mark.parametrize(
    "earlier", [pin(0, a=5, b=6), finished(pin(0, a=1, b=7)), commit(0, a=1, b=7)]
)
def test_an_earlier_save_stays_beside_the_one_that_the_hook_committed(earlier: Pin) -> None:
    pins = [earlier, commit(1, a=1, b=2)]
    assert follow_source(make_listing(a=1, b=2), pins, "n0") == PinChanges()


def test_a_void_commit_is_a_pin_like_any_other() -> None:
    void = replace(commit(0, a=1, b=2), files=files({"a": 1, "b": 3}))
    assert follow_source(make_listing(a=1, b=3, c=4), [void], "n0") == PinChanges(linked=("c",))
    assert follow_source(make_listing(a=1, b=9), [void], "n0") == PinChanges((void,), new_k=1)


def cost(
    step: int,
    size: int = 10,
    *,
    gone: bool = True,
    stored: bool = False,
    verified: bool = False,
    sending: int = 0,
) -> PinCost:
    notes, path = PinNotes(sending=sending), Path(str(step))
    pin = Pin(f"checkpoint-{step}", 0, "n0", 0, path, notes=notes, stored=stored)
    return PinCost(pin, size, gone, verified, step)


def dropped_numbers(pins: list[PinCost], lacking: int, full: str = "oldest") -> list[int]:
    relief = choose_to_give_up(pins, SpoolRoom(100 + lacking, 1000, 10), SpoolRule(100, full))
    return [int(p.checkpoint.removeprefix("checkpoint-")) for p in relief.drop]


def test_nothing_goes_while_there_is_room() -> None:
    four = [cost(n, stored=True) for n in (1, 2, 3, 4)]
    assert dropped_numbers(four, 0) == []
    assert choose_to_give_up(four, SpoolRoom(10**9, 10, 10), SpoolRule()).drop == ()


def test_what_the_store_has_goes_first_and_the_verified_before_the_rest() -> None:
    pins = [cost(1), cost(2, stored=True), cost(3, stored=True, verified=True), cost(4)]
    assert dropped_numbers(pins, 1) == [3]
    assert dropped_numbers(pins, 11) == [3, 2]
    assert dropped_numbers(pins, 21) == [3, 2, 1]


def test_the_oldest_goes_but_neither_the_newest_nor_the_one_that_is_on_its_way() -> None:
    pins = [cost(1, sending=6, stored=True, gone=False), cost(2, sending=7), cost(3, sending=8)]
    pins += [cost(4), cost(5)]
    assert dropped_numbers(pins, 1) == [3]
    assert dropped_numbers(pins, 99) == [3, 4]


def test_each_nth_stays_as_long_as_that_is_enough() -> None:
    pins = [cost(500 * n) for n in (1, 2, 3, 4, 5, 6)]
    assert dropped_numbers(pins, 25, "every:2") == [500, 1500, 2500]
    assert dropped_numbers(pins, 45, "every:2") == [500, 1500, 2500, 1000, 2000]
    assert dropped_numbers(pins, 25, "every:3") == [500, 1000, 2000]


def test_who_waits_gives_up_nothing_that_the_store_has_not_and_hears_that_it_is_full() -> None:
    relief = choose_to_give_up(
        [cost(1, stored=True), cost(2), cost(3)], SpoolRoom(125, 1000, 10), SpoolRule(100, "wait")
    )
    assert [p.checkpoint for p in relief.drop] == ["checkpoint-1"]
    assert "nothing new is pinned until an upload is finished" in relief.full


def test_what_the_trainer_still_has_takes_no_room_and_makes_none() -> None:
    assert dropped_numbers([cost(1, gone=False), cost(2, size=0), cost(3), cost(4)], 5) == [3]


def test_where_the_disk_is_full_of_something_else_nothing_is_given_up_in_vain() -> None:
    pins = [cost(1, stored=True), cost(2), cost(3)]
    relief = choose_to_give_up(pins, SpoolRoom(30, 0, 21), SpoolRule())
    assert [p.checkpoint for p in relief.drop] == ["checkpoint-1"]
    assert (bool(relief.full), relief.given_up) == (True, ())
    for room, rule in (
        (SpoolRoom(30, 0, 20), SpoolRule()),
        (SpoolRoom(30, 0, 21), SpoolRule(15)),
    ):
        relief = choose_to_give_up(pins, room, rule)
        assert [p.checkpoint for p in relief.drop] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("room", "why"),
    [
        (SpoolRoom(130, 10, 10), "spool full: 0.0 MiB held"),
        (SpoolRoom(100, 0, 10), "disk full: 0.0 MiB free"),
    ],
)
def test_what_is_given_up_is_said_with_the_reason(room: SpoolRoom, why: str) -> None:
    relief = choose_to_give_up([cost(n, 2**20 * 3) for n in (1, 2, 3)], room, SpoolRule(100))
    assert relief.given_up[0].startswith(
        "checkpoint-1: dropped before it was uploaded, to free 3.0 MiB ("
    )
    assert why in relief.given_up[0]
    assert "spool_full: oldest" in relief.given_up[0]


def test_bytes_are_held_by_pins_where_nobody_else_has_a_name_and_counted_once() -> None:
    file = Stat("a", 5, 1, inode=1, device=0, links=1)
    ours = Pin(
        "checkpoint-4", 0, "n0", 0, Path("x"), (file, replace(file, path="b", inode=2, links=2))
    )
    twice = Pin("checkpoint-4", 1, "n0", 0, Path("y"), (replace(file, inode=2, links=2),))
    assert held_bytes([ours]) == 5
    assert (held_bytes([ours, twice]), held_bytes([twice])) == (10, 0)
    two_names = (replace(file, links=2), replace(file, path="b", links=2))
    assert held_bytes([replace(ours, files=two_names)]) == 5


ROOT = Path(__file__).parent.parent.parent


def looked(
    out: Path, node: str = "n0", *, is_proven: bool = False
) -> tuple[tuple[LocalSave, ...], tuple[Failure, ...]]:
    scan = list_and_pin_saves(RunDir("run", out), Pinner(node, lambda *_: is_proven))
    return scan.saves, scan.failures


@dataclass(frozen=True)
class Interrupted(Pinner):
    """When the pins of a scan have been listed, something happens."""

    happens: Callable[[], object] = list

    def make_room(self, *args: Any) -> Relief:
        self.happens()
        return Pinner.make_room(self, *args)


def test_a_commit_and_rotation_during_one_scan_are_not_missed(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    (source / next(iter(ONE))).rename(tmp_path / "late")
    looked(tmp_path)

    def finish() -> None:
        (tmp_path / "late").rename(source / next(iter(ONE)))
        commit_pin(source)
        shutil.rmtree(source)

    scan = list_and_pin_saves(
        RunDir("run", tmp_path), Interrupted("n0", lambda *_: False, happens=finish)
    )
    assert [
        (s.k, s.files.is_gone, s.pin is not None and s.pin.is_committed) for s in scan.saves
    ] == [(1, True, True)]


def test_a_pin_of_the_hook_is_ours_and_stands_for_the_save_alone(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    first = next(iter(ONE))
    (source / first).rename(tmp_path / "late")
    looked(tmp_path, "a-name-that-no-hook-knows")
    (tmp_path / "late").rename(source / first)
    commit_pin(source)
    shutil.rmtree(source)
    (local_save,), failures = looked(tmp_path, "a-name-that-no-hook-knows")
    assert (local_save.k, local_save.pin and local_save.pin.node, failures) == (
        1,
        "a-name-that-no-hook-knows",
        (),
    )
    assert local_save.pin
    assert local_save.pin.is_committed
    assert sorted(local_save.files.by_path) == sorted(ONE)


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_whole_save_that_was_spoiled_before_it_was_sent_is_told_of(
    tmp_path: Path, *, is_committed: bool
) -> None:
    source = lay(tmp_path, ONE)
    if is_committed:
        commit_pin(source)
    pinner = Pinner("n0", lambda *_: False)
    assert list_and_pin_saves(RunDir("run", tmp_path), pinner).notes == ()
    names = sorted(ONE)
    (source / names[0]).write_bytes(b"again, in place")
    (source / names[1]).unlink()
    (source / names[1]).write_bytes(b"again, by another file")
    for _ in range(2):
        notes = list_and_pin_saves(RunDir("run", tmp_path), pinner).notes
        assert ["overwritten before it was uploaded" in n for n in notes] == [True] * is_committed


def rotated(out: Path, *steps: int) -> None:
    """Saves that the hook committed and rotation took, and one that is still there."""
    for step in (*steps, 99):
        source = lay(out, ONE).rename(out / f"checkpoint-{step}")
        commit_pin(source)
        if step != 99:
            shutil.rmtree(source)


def budgeted(out: Path, budget: int, full: str = "oldest") -> Scan:
    return list_and_pin_saves(
        RunDir("run", out), Pinner("n0", lambda *_: False, SpoolRule(budget, full))
    )


def test_the_budget_is_kept_aloud_and_what_the_store_has_goes_first(tmp_path: Path) -> None:
    size = sum(map(len, ONE.values()))
    rotated(tmp_path, 1, 2, 3)
    mark_stored(next(p for p in list_pins(tmp_path) if p.checkpoint == "checkpoint-2"))
    steps = []
    for most in (3, 2, 1):
        scan = budgeted(tmp_path, most * size)
        steps.append([s.checkpoint_dir.step for s in scan.saves])
        assert bool(scan.notes) == (most == 1)
    assert steps == [[1, 2, 3, 99], [1, 3, 99], [3, 99]]
    assert scan.notes[0].startswith("checkpoint-1: dropped before it was uploaded")


@pytest.mark.parametrize(("node", "numbers"), [("n0", [1]), ("n1", [0, 1])])
def test_an_earlier_save_of_a_name_makes_room_if_it_is_ours(
    tmp_path: Path, node: str, numbers: list[int]
) -> None:
    for files in (ONE, other(ONE)):
        shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
        commit_pin(lay(tmp_path, files))
    looked(tmp_path, node)
    assert [s.k for s in budgeted(tmp_path, 1).saves] == numbers


def test_who_waits_pins_nothing_new_and_still_sees_it(tmp_path: Path) -> None:
    rotated(tmp_path, 1)
    lay(tmp_path, ONE)
    scan = budgeted(tmp_path, 1, "wait")
    assert [(s.checkpoint_dir.name, s.pin is None) for s in scan.saves] == [
        ("checkpoint-1", False),
        ("checkpoint-4", True),
        ("checkpoint-99", False),
    ]
    assert "nothing new is pinned until an upload is finished" in scan.notes[0]
    assert budgeted(tmp_path, 1, "oldest").saves[1].pin is not None


def test_on_a_full_disk_everything_is_seen_and_pinning_fails(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.worker.test_pinning import *\n"
        "out = Path(sys.argv[1]); rotated(out, 1); lay(out, ONE)\n"
        "def fill():\n"
        " for n in range(99): (out / f'filler{n}').touch()\n"
        "try: fill()\n"
        "except OSError: pass\n"
        "found = list_and_pin_saves(RunDir('run', out), Pinner('n0', lambda *_: False))\n"
        "print([(s.checkpoint_dir.name, len(s.files.by_path), s.pin and s.pin.node) for s in"
        " found.saves])\n"
        "print(sorted((f.checkpoint, 'No space left' in f.text) for f in found.failures))\n"
    )
    mounted = f'mount -t tmpfs -o nr_inodes=45 tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, sys.executable, program],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    count = len(ONE)
    assert done.stdout.splitlines() == [
        (
            f"[('checkpoint-1', {count}, 'n0'), ('checkpoint-4', {count}, None), ('checkpoint-99',"
            f" {count}, 'n0')]"
        ),
        "[('checkpoint-1', True), ('checkpoint-4', True), ('checkpoint-99', True)]",
    ], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_files_of_another_user_are_a_failure_with_advice(tmp_path: Path) -> None:
    lay(tmp_path / "x", ONE).rename(tmp_path / "checkpoint-4")
    lay(tmp_path / "x", ONE).rename(tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8").chmod(0)
    program = (
        "import os, sys; from pathlib import Path; from tests.worker.test_pinning import "
        "looked\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "seen, failed = looked(Path(sys.argv[1]))\n"
        "print([s.checkpoint_dir.name for s in seen], [(f.checkpoint, f.error, 'the user who"
        " trains' in "
        "f.hint) for f in failed])"
    )
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)
    (tmp_path / "_ckptsync").mkdir(mode=0o777)
    os.chown(tmp_path / "_ckptsync", 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "('checkpoint-8', 'ConfigError', True)" in done.stdout, done.stderr
    protected = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    assert ("('checkpoint-4', 'ConfigError', True)" in done.stdout) == protected


def test_what_is_proven_and_not_pinned_is_not_pinned_again(tmp_path: Path) -> None:
    lay(tmp_path, ONE)
    (local_save,), _ = looked(tmp_path, is_proven=True)
    assert local_save.pin is None
    assert not (tmp_path / "_ckptsync").exists()
