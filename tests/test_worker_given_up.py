"""What a head has given up a real worker never sends again: marked, removed, after a restart, with files that come later, and when a report asks for it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.head.gc import Asked, tick
from ckptsync.head.rules import Rules
from ckptsync.records.names import OURS
from ckptsync.records.report import Finding, Report
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.test_worker_push import lay
from tests.test_worker_tick import progress, put, settle, verify

LAST = Asked(lambda _: Rules(keep_last=1), grace=0.0)
SHARDS = Asked(lambda _: Rules(shards=1), grace=0.0)


HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
MODEL = len(HEADER).to_bytes(8, "little") + HEADER
W = "model.safetensors"


def sent(out: Path, store: MemoryStore, exclude: tuple[str, ...] = ()) -> Worker:
    """A worker that has sent two checkpoints, and remembers."""
    for n in (1, 2):
        state = json.dumps({"global_step": n}).encode()
        lay(out / "x", {"trainer_state.json": state, W: MODEL + b"abcd", "notes.txt": b"s"}, float(n)).rename(
            out / f"checkpoint-{n}"
        )
    w = again(out, store, exclude)
    settle(w)
    return w


def files(store: MemoryStore, location: str = "checkpoint-1") -> list[str]:
    return [e.name for e in store.names(f"run/{location}/")]


def given_up(tmp_path: Path, asked: Asked = LAST, *, ticks: int = 2, exclude: tuple[str, ...] = ()) -> tuple[MemoryStore, Worker]:
    """Two checkpoints that a worker has sent, verified, of which a head has let the first one go."""
    store = MemoryStore()
    w = sent(tmp_path, store, exclude=exclude)
    for location in ("checkpoint-1", "checkpoint-2"):
        verify(store, location)
    for _ in range(ticks):
        assert tick(store, asked).failed == ()
    return store, w


def again(tmp_path: Path, store: MemoryStore, exclude: tuple[str, ...] = ()) -> Worker:
    """The same after a restart, with nothing remembered."""
    return Worker(WorkerOptions("n0", (RunDir("run", tmp_path),), exclude=exclude), store)


@pytest.mark.parametrize("ticks", [1, 2])
@pytest.mark.parametrize("exclude", [(), ("notes.txt",)])
def test_what_is_marked_or_removed_is_not_sent_again(tmp_path: Path, ticks: int, exclude: tuple[str, ...]) -> None:
    store, w = given_up(tmp_path, ticks=ticks, exclude=exclude)
    before = files(store)
    assert bool(before) == (ticks == 1)
    for worker in (w, again(tmp_path, store, exclude)):
        settle(worker)
        assert progress(worker.tick(5000.0))["checkpoint-1.0"].phase == "retired"
        assert files(store) == before
    assert [n for n in (e.name for e in store.names(f"run/{OURS}/checkpoint-1/")) if "/manifest-" in n] == [] or ticks == 1


def test_shards_that_went_are_not_sent_again_and_the_model_stays(tmp_path: Path) -> None:
    store, w = given_up(tmp_path, SHARDS)
    settle(w)
    settle(again(tmp_path, store))
    assert files(store) == []
    seen = fresh(store).of("run", "checkpoint-1")
    assert seen is not None
    assert (seen.status, seen.conditions.resume.holds) == ("VERIFIED", False)


def test_a_save_that_is_written_after_it_is_another_one_and_is_sent(tmp_path: Path) -> None:
    store, _ = given_up(tmp_path)
    for path in (tmp_path / "checkpoint-1").iterdir():
        path.unlink()
    (tmp_path / "checkpoint-1").rmdir()
    later = time.time() - 3600
    lay(tmp_path / "x", {"trainer_state.json": b'{"global_step": 1}', W: MODEL + b"efgh"}, later).rename(tmp_path / "checkpoint-1")
    settle(again(tmp_path, store))
    assert [e.name.rpartition("/")[2] for e in store.names("run/checkpoint-1/")] == [W, "trainer_state.json"]


def test_files_that_come_later_to_what_is_given_up_are_not_sent_either(tmp_path: Path) -> None:
    store, _ = given_up(tmp_path, ticks=1)
    late = tmp_path / "checkpoint-1" / "rng_state_0.pth"
    late.write_bytes(b"late")
    os.utime(late, (9.0, 9.0))
    before = files(store)
    settle(again(tmp_path, store))
    assert files(store) == before


def test_a_report_on_what_is_given_up_asks_for_nothing(tmp_path: Path) -> None:
    store, w = given_up(tmp_path, ticks=1)
    names = tuple(e.name for e in store.names(f"run/{OURS}/checkpoint-1/") if "/manifest-" in e.name)
    store.delete("run/checkpoint-1/model.safetensors")
    damage = (Finding("missing", f"checkpoint-1/{W}", "gone"),)
    put(store, Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", names, "", 0, damage))
    found = w.tick(6000.0)
    assert found.repairs == ()
    assert found.lacks == {}
    assert "run/checkpoint-1/model.safetensors" not in files(store)


def test_what_a_report_wants_and_this_node_has_no_more_is_told_until_it_is_answered(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    verify(store, "checkpoint-1")
    names = tuple(e.name for e in store.names(f"run/{OURS}/checkpoint-1/") if "/manifest-" in e.name)
    for path in [*(tmp_path / "checkpoint-1").iterdir(), *(tmp_path / "_ckptsync/pins").glob("checkpoint-1.*/files/*")]:
        path.unlink()
    store.delete("run/checkpoint-1/model.safetensors")
    damage = (Finding("missing", f"checkpoint-1/{W}", "gone"),)
    report = put(store, Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", names, "", 0, damage))
    assert w.tick(6000.0).lacks == {report: (f"checkpoint-1/{W}",)}
    assert w.tick(6001.0).lacks == {report: (f"checkpoint-1/{W}",)}
    put(store, Report("run", "checkpoint-1", "checkpoint-1", 10, "digest", "ok", names, "", 0, ()))
    assert w.tick(6002.0).lacks == {}
