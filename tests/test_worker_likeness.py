"""What might be half a save, and what might be all that a script writes: another checkpoint like it tells, or somebody who knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.model import Demands
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.scan import Spot
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import Stat
from ckptsync.worker.hold import Held, Hold
from ckptsync.worker.likeness import is_like_stored, shape
from ckptsync.worker.looking import Seen
from ckptsync.worker.push import push_now
from ckptsync.worker.selecting import EVERYTHING, Selection
from tests.test_worker_push import kept
from tests.test_worker_tick import pinned, progress, worker

EMPTY = (2).to_bytes(8, "little") + b"{}"
BARE = {"config.json": b"{}", "model.safetensors": EMPTY, "tokenizer.json": b"{}"}


def saved(out: Path, name: str, files: dict[str, bytes] = BARE) -> Path:
    (out / name).mkdir(parents=True)
    for path, content in files.items():
        (out / name / path).write_bytes(content)
    return out / name


def test_a_first_save_of_weights_alone_is_never_taken_and_it_is_said_why(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    saved(tmp_path, "checkpoint-1")
    for now in (0.0, 600.0, 1e6):
        assert progress(w.tick(now))["checkpoint-1.0"].phase == "waiting"
    (note,) = w.look(1e6).notes
    assert note.startswith(
        "run/checkpoint-1: not taken: no trainer_state.json, which comes last, and no other checkpoint like it: "
    )
    assert note.endswith("push it (ckptsync push), or let it call ckptsync.mark_saved")
    assert kept(store) == {}


def test_a_second_one_like_it_that_is_at_rest_for_long_tells_that_this_is_all(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    saved(tmp_path, "checkpoint-1")
    w.tick(0.0)
    w.tick(600.0)
    saved(tmp_path, "checkpoint-20")
    assert {p.phase for p in progress(w.tick(700.0)).values()} == {"waiting"}
    w.tick(1299.0)
    assert kept(store) == {}
    w.tick(1300.0)
    w.tick(1301.0)
    assert kept(store).keys() == {"checkpoint-1", "checkpoint-20"}


def test_what_trainer_leaves_on_its_way_tells_nothing_and_its_end_tells_that_the_first_was_torn(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    torn = saved(tmp_path, "checkpoint-1")
    w.tick(0.0)
    w.tick(600.0)
    whole = saved(tmp_path, "checkpoint-2")
    w.tick(700.0)
    assert kept(store) == {}
    (whole / "trainer_state.json").write_bytes(b'{"global_step": 2}')
    w.tick(800.0)
    assert "which the trainer writes last" in progress(w.tick(2000.0))["checkpoint-1.0"].detail
    assert kept(store).keys() == {"checkpoint-2"}
    shutil.rmtree(torn)
    assert progress(w.tick(2001.0))["checkpoint-1.0"].phase == "missed"
    assert pinned(tmp_path) == ["checkpoint-2.0"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_one_that_lacks_a_file_of_the_others_is_not_like_them(tmp_path: Path, name: str) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    saved(tmp_path, "checkpoint-1")
    saved(tmp_path, "checkpoint-2", {path: content for path, content in BARE.items() if path != name})
    for now in (0.0, 600.0, 1200.0, 1800.0):
        w.tick(now)
    assert kept(store) == {}


def test_what_a_script_removes_meanwhile_stays_pinned_and_goes_when_another_tells(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    first = saved(tmp_path, "checkpoint-1")
    w.tick(0.0)
    w.tick(600.0)
    shutil.rmtree(first)
    assert progress(w.tick(601.0))["checkpoint-1.0"].phase == "waiting"
    saved(tmp_path, "checkpoint-2")
    for now in (700.0, 1300.0, 1301.0):
        w.tick(now)
    assert kept(store).keys() == {"checkpoint-1", "checkpoint-2"}


def test_what_a_script_removes_meanwhile_can_be_pushed(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path / "run", store)
    first = saved(tmp_path / "run", "checkpoint-1")
    saved(tmp_path / "run", "checkpoint-2", {"x": b""})
    w.tick(0.0)
    w.tick(600.0)
    shutil.rmtree(first)
    push_now(tmp_path / "run", store, "n0")
    assert kept(store)["checkpoint-1"]["n0"] == BARE


def test_one_that_was_pushed_by_hand_tells_of_all_that_come_after_it(tmp_path: Path) -> None:
    store = MemoryStore()
    first = saved(tmp_path / "run", "checkpoint-1")
    (done,) = push_now(first, store, "n0")
    assert "taken to be finished on your word" in done.notes[-1]
    shutil.rmtree(first)
    saved(tmp_path / "run", "checkpoint-2")
    w = worker(tmp_path / "run", store)
    assert [progress(w.tick(now))["checkpoint-2.0"].phase for now in (0.0, 599.0, 600.0)] == ["waiting", "waiting", "sent"]


ACCELERATE = {"model.safetensors": EMPTY, "optimizer.bin": b"pickled", "scheduler.bin": b"pickled"}


def test_accelerate_s_save_without_the_first_rank_s_random_state_is_like_one_of_another_node(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    files = {name: content for name, content in ACCELERATE.items() if name == "model.safetensors"} | {"random_states_2.pkl": b""}
    saved(tmp_path, "checkpoint_0", files)
    w.tick(0.0)
    assert progress(w.tick(600.0))["checkpoint_0.0"].detail.startswith("no random_states_0.pkl, which comes last")
    saved(tmp_path, "checkpoint_1", files)
    for now in (601.0, 1201.0, 1202.0):
        w.tick(now)
    assert kept(store).keys() == {"checkpoint_0", "checkpoint_1"}


def test_a_shape_is_of_names_without_the_step_and_with_every_other_number() -> None:
    assert shape(["model-4.pt", "step_0004/x", "b"], 4) == shape(["model-16.pt", "step_0016/x", "b"], 16)
    assert shape(["model-00001-of-00003.safetensors"], 4) != shape(["model-00001-of-00002.safetensors"], 5)
    assert shape(["a4"], 4) != shape(["a44"], 5)


def manifest(checkpoint: str, *names: str) -> Manifest:
    files = tuple(FileEntry(name, 1, "d", 1, (), 0) for name in names)
    return Manifest("run", checkpoint, checkpoint, "n1", 0, files, (), 0, 0, Demands())


def test_what_is_stored_under_the_same_name_tells_nothing_and_what_is_not_sent_by_choice_is_not_missed() -> None:
    held = {name: Held(Stat(name, 1, 0, 0, 0), Path(), is_pinned=False) for name in ("a", "b.log")}
    one = Seen("run", Spot("checkpoint-2", "trainer", Path()), Hold("checkpoint-2", "trainer", held), None)
    assert not is_like_stored(one, [manifest("checkpoint-2", "a", "b.log"), manifest("checkpoint-1", "a")], EVERYTHING)
    assert is_like_stored(one, [manifest("checkpoint-1", "a", "b.log")], EVERYTHING)
    assert is_like_stored(one, [manifest("checkpoint-1", "a")], Selection(exclude=("*.log",)))
