from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptsync
from ckptsync.catalogue.fresh import fresh
from ckptsync.hooks import parts, room, staging
from ckptsync.hooks.here import Here
from ckptsync.scan import Spot
from ckptsync.spool.marks import Begun
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import OURS, walk
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.hooking import Said, commits, here, other_disk

__all__ = ["other_disk"]  # a fixture
BEGUN = Begun("t", 0, 3, 0, "h", 1, "1", "b", 100.0, "torch 2")
PROCESS = "0123456789abcdef"


def saved(out: Path, *names: str) -> tuple[Here, Spot]:
    (out / "step-4").mkdir(parents=True)
    for name in names:
        (out / "step-4" / name).write_text(name)
    return here(out, 0, 3), Spot("step-4", "dcp", out / "step-4")


def staged(of: Here, spot: Spot) -> staging.Staged | None:
    mark = parts.mark(of.spool, BEGUN, "s", spot.name, 4)
    parts.mark(of.spool, replace(BEGUN, rank=1), "of another save", spot.name, 4)
    return staging.stage(of, spot, mark, PROCESS)


def test_links_are_no_pin_until_they_are_published(tmp_path: Path) -> None:
    of, spot = saved(tmp_path, "a", "b")
    found = staged(of, spot)
    assert found is not None
    assert (found.seen, found.is_whole((0,)), found.is_whole((0, 1))) == (frozenset({0}), True, False)
    assert commits(tmp_path) == {}
    found.publish(of, parts.commit(BEGUN, "s", "step-4", 4, (0,)), Said())
    assert set(commits(tmp_path)["step-4.0"].files) == {"a", "b"}
    assert commits(tmp_path)["step-4.0"].files == {f.path: (f.size, f.mtime) for f in walk(spot.path).files}


def test_of_a_file_among_others_only_that_one_is_kept(tmp_path: Path) -> None:
    of, _ = saved(tmp_path, "a.ckpt", "b.ckpt")
    found = staged(of, Spot("a.ckpt", "lightning", tmp_path / "step-4", ("a.ckpt",)))
    assert found is not None
    assert [f.path for f in found.files] == ["a.ckpt"]


def test_where_there_is_no_room_for_the_next_save_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, spot = saved(tmp_path, "a")
    monkeypatch.setattr(room, "free", lambda _: 1)
    assert staged(of, spot) is None


def test_where_no_link_reaches_nothing_is_kept(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / OURS).symlink_to(other_disk)
    of, spot = saved(tmp_path, "a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert staged(of, spot) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list((other_disk / "pins").iterdir()) == []


@pytest.mark.parametrize("does", [lambda path: (path / "a").unlink(), lambda path: (path / "c").touch()], ids=["takes", "adds"])
def test_what_another_rank_still_writes_is_kept_by_that_one(
    does: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, spot = saved(tmp_path, "a", "b")

    def free(_: Path) -> int:
        does(spot.path)
        return 1 << 40

    monkeypatch.setattr(room, "free", free)
    assert staged(of, spot) is None
    assert list((of.spool / "pins").iterdir()) == []


def test_on_a_disk_that_nodes_share_the_last_of_all_pins(tmp_path: Path) -> None:
    of, spot = saved(tmp_path, "a")
    parts.mark(of.spool, replace(BEGUN, rank=1, host="another"), "s", spot.name, 4)
    assert staged(of, spot) is None


def test_nothing_is_kept_of_nothing(tmp_path: Path) -> None:
    assert staged(*saved(tmp_path)) is None


def test_only_what_a_process_without_an_introduction_left_is_swept(tmp_path: Path) -> None:
    of, spot = saved(tmp_path, "a")
    found = staged(of, spot)
    assert found is not None
    (of.spool / "trains").mkdir()
    (of.spool / "trains" / f"{PROCESS}.json").touch()
    (of.spool / "pins" / ".new-hook-77-step-4").mkdir()
    staging.sweep(of.spool)
    assert found.fresh.exists()
    (of.spool / "trains" / f"{PROCESS}.json").unlink()
    staging.sweep(of.spool)
    assert [p.name for p in (of.spool / "pins").iterdir()] == [".new-hook-77-step-4"], (
        "that one is made in this moment, by the last rank"
    )


@pytest.mark.parametrize("ticks", [(), (0.0,), (0.0, 11.0, 71.0)], ids=["no worker", "seen by a worker", "sent by a worker"])
def test_what_a_worker_made_of_it_meanwhile_stays_one_save(tmp_path: Path, ticks: tuple[float, ...]) -> None:
    demo = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2" / "node0" / "checkpoint-4"
    shutil.copytree(demo, tmp_path / "checkpoint-4")
    of, spot = here(tmp_path, 0, 2), Spot("checkpoint-4", "trainer", tmp_path / "checkpoint-4")
    store = MemoryStore()
    found = staged(of, spot)
    worker = Worker(WorkerOptions("n0", (RunDir("run", tmp_path),)), store)
    for now in ticks:
        worker.tick(now)
    assert found is not None
    found.publish(of, parts.commit(BEGUN, "s", "checkpoint-4", 4, (0,)), Said())
    shutil.rmtree(spot.path)
    for now in (100.0, 200.0):
        worker.tick(now)
    manifests = [entry.name for entry in store.names("") if "/manifest-" in entry.name]
    assert len(manifests) == 1
    assert {location.location for location in fresh(store).locations} == {"checkpoint-4"}
    assert {p.checkpoint: p.phase for p in worker.tick(300.0).progress} in ({"checkpoint-4": "stored"}, {})
