"""What might be half a save, and what might be all that a script writes: another checkpoint like it
tells, or somebody who knows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptsync.checkpoint_dirs import CheckpointDir
from ckptsync.spool.markers import PinNotes
from ckptsync.spool.pins import Pin
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import Stat
from ckptsync.worker.local_save import LocalSave, build_local_save
from ckptsync.worker.observation import fingerprint, is_like_another
from tests.support.worker_in_process import kept, pinned, progress, push_now, tick, worker

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
        assert progress(tick(w, now))["checkpoint-1.0"].phase == "waiting"
    (note,) = w.scan(1e6).notes
    assert note.startswith(
        "run/checkpoint-1: not uploaded: no trainer_state.json, which a trainer writes last, and no"
        " similar checkpoint to compare with: "
    )
    assert note.endswith("push it (ckptsync push), or call ckptsync.mark_saved")
    assert kept(store) == {}


def test_a_similar_one_at_rest_for_long_tells_that_this_is_all(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    saved(tmp_path, "checkpoint-1")
    tick(w, 0.0)
    tick(w, 600.0)
    saved(tmp_path, "checkpoint-20")
    assert {p.phase for p in progress(tick(w, 700.0)).values()} == {"waiting"}
    tick(w, 1299.0)
    assert kept(store) == {}
    tick(w, 1300.0)
    tick(w, 1301.0)
    assert kept(store).keys() == {"checkpoint-1", "checkpoint-20"}


def test_a_whole_save_of_a_trainer_tells_that_the_first_was_torn(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    torn = saved(tmp_path, "checkpoint-1")
    tick(w, 0.0)
    tick(w, 600.0)
    whole = saved(tmp_path, "checkpoint-2")
    tick(w, 700.0)
    assert kept(store) == {}
    (whole / "trainer_state.json").write_bytes(b'{"global_step": 2}')
    tick(w, 800.0)
    assert "which the trainer writes last" in progress(tick(w, 2000.0))["checkpoint-1.0"].detail
    assert kept(store).keys() == {"checkpoint-2"}
    shutil.rmtree(torn)
    assert progress(tick(w, 2001.0))["checkpoint-1.0"].phase == "missed"
    assert pinned(tmp_path) == ["checkpoint-2.0"]


def test_what_a_script_removes_is_sent_when_a_similar_one_tells(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path, store)
    first = saved(tmp_path, "checkpoint-1")
    tick(w, 0.0)
    tick(w, 600.0)
    shutil.rmtree(first)
    assert progress(tick(w, 601.0))["checkpoint-1.0"].phase == "waiting"
    saved(tmp_path, "checkpoint-2")
    for now in (700.0, 1300.0, 1301.0):
        tick(w, now)
    assert kept(store).keys() == {"checkpoint-1", "checkpoint-2"}


def test_what_a_script_removes_meanwhile_can_be_pushed(tmp_path: Path) -> None:
    store = MemoryStore()
    w = worker(tmp_path / "run", store)
    first = saved(tmp_path / "run", "checkpoint-1")
    saved(tmp_path / "run", "checkpoint-2", {"x": b""})
    tick(w, 0.0)
    tick(w, 600.0)
    shutil.rmtree(first)
    push_now(tmp_path / "run", store, "n0")
    assert kept(store)["checkpoint-1"]["n0"] == BARE


def make_save(step: int, *names: str, stable: bool = True) -> LocalSave:
    name = f"checkpoint-{step}"
    stats = tuple(Stat(name, 1, 0, 0, 0) for name in names)
    pin = Pin(
        name, 0, "n0", 0, Path(), stats, notes=PinNotes(stable=fingerprint(stats) if stable else 0)
    )
    return build_local_save("run", CheckpointDir(name, "trainer", Path()), None, pin)


def test_alike_are_names_without_the_step_and_with_every_other_number() -> None:
    first = make_save(4, "model-4.pt", "step_0004/x", "b")
    assert is_like_another(first, [make_save(16, "model-16.pt", "step_0016/x", "b")])
    assert not is_like_another(first, [first, make_save(16, "model-16.pt", "step_0016/x")])
    assert not is_like_another(
        first, [make_save(16, "model-16.pt", "step_0016/x", "b", stable=False)]
    )
    assert not is_like_another(make_save(4, "a-00001-of-00003"), [make_save(5, "a-00001-of-00002")])
    assert not is_like_another(make_save(4, "a4"), [make_save(5, "a44")])
