"""A push sends what a daemon would send, and says what a daemon would say; what it takes on the user's word, it says aloud."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Begun, RankMark, Took, begun_path, save_folder, write_mark
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.offering import offered
from ckptsync.worker.options import RunDir
from ckptsync.worker.push import ASSUMED, planned, push_now
from ckptsync.worker.remembering import remembered
from ckptsync.worker.selecting import Selection
from tests.hook_pins import commit
from tests.test_worker_push import ONE, TWO, T, kept, lay, manifests

FINISHED = {"model.safetensors": b"\2\0\0\0\0\0\0\0{}", "optimizer.pt": b"states", "trainer_state.json": b'{"global_step": 4}'}


def told(store: MemoryStore) -> list[tuple[str, str]]:
    """The save's id and the trainer of each manifest."""
    return [(k.manifest.save, k.manifest.trainer) for k in manifests(store)]


def test_a_push_s_manifest_says_who_wrote_the_save_and_when_it_was_settled_and_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    push_now(lay(tmp_path, FINISHED), store, "n0")
    [manifest] = (k.manifest for k in manifests(store))
    assert manifest.trainer == "trainer"
    assert 0 < manifest.times["settled"] <= manifest.times["sending"]
    assert not (tmp_path / "_ckptsync").exists(), "a push makes no spool"


def test_a_hook_s_pin_gives_the_save_its_id_and_its_added_files(tmp_path: Path) -> None:
    store = MemoryStore()
    pin = commit(lay(tmp_path, FINISHED), "s1")
    (pin / "added").mkdir()
    (pin / "added" / "config.json").write_text("{}")
    push_now(tmp_path, store, "n0", "run")
    assert told(store) == [("s1", "hf")]
    assert kept(store)["checkpoint-4"]["n0"] == {**FINISHED, "config.json": b"{}"}
    assert spool.pins(tmp_path)[0].stored, "who waits for it is told"


def test_marks_of_all_ranks_give_the_save_its_id_where_nobody_pinned_it(tmp_path: Path) -> None:
    store, files = MemoryStore(), tmp_path / "_ckptsync"
    lay(tmp_path, FINISHED)
    write_mark(begun_path(files, "p"), Begun("t", 0, 1, 1, "h", 1, "1", "b", T / 1e9 - 9))
    mark = RankMark("t", "s2", "checkpoint-4", 4, 0, 1, 1, "h", 1, T / 1e9 + 9)
    write_mark(save_folder(files, "checkpoint-4", "s2") / "rank-0.json", mark)
    (result,) = push_now(tmp_path, store, "n0", "run")
    assert told(store) == [("s2", "trainer")]
    assert result.notes == ()


def test_what_rotation_took_and_a_pin_kept_is_sent_once(tmp_path: Path) -> None:
    store = MemoryStore()
    commit(lay(tmp_path, FINISHED), "s1")
    shutil.rmtree(tmp_path / "checkpoint-4")
    lay(tmp_path, ONE).rename(tmp_path / "checkpoint-5")
    results = push_now(tmp_path, store, "n0", "run")
    assert [(r.checkpoint, r.phase) for r in results] == [("checkpoint-5", "sent"), ("checkpoint-4", "sent")]
    assert kept(store)["checkpoint-4"]["n0"] == FINISHED
    assert [r.checkpoint for r in push_now(tmp_path, store, "n0", "run")] == ["checkpoint-5"]


def test_a_save_that_was_written_over_is_sent_from_its_pin_beside_the_new_one(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, FINISHED)
    commit(source, "s1")
    shutil.rmtree(source)
    lay(tmp_path, {**FINISHED, "optimizer.pt": b"others"}, 5000.0)
    push_now(tmp_path, store, "n0", "run")
    assert sorted(files["n0"]["optimizer.pt"] for files in kept(store).values()) == [b"others", b"states"]
    assert sorted(told(store)) == [("", "trainer"), ("s1", "hf")]


def test_what_rotation_has_only_begun_to_take_is_sent_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    commit(lay(tmp_path, FINISHED), "s1")
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    (result,) = push_now(tmp_path, store, "n0", "run")
    assert (kept(store)["checkpoint-4"]["n0"], result.notes) == (FINISHED, ())


def test_what_the_trainer_took_back_before_anybody_said_that_it_is_whole_is_not_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    pin = spool.open_pin(tmp_path, "checkpoint-4", 1, "n0")
    assert pin is not None
    shutil.copytree(lay(tmp_path, {**FINISHED, "placeholder": b"x"}), pin.root, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "placeholder").unlink()
    push_now(tmp_path, store, "n0", "run")
    assert kept(store)["checkpoint-4"]["n0"] == FINISHED


@pytest.mark.parametrize(("node", "took"), [("other", Took(stable=1)), ("n0", Took())])
def test_what_another_node_pinned_and_what_nobody_saw_whole_stays_where_it_is(tmp_path: Path, node: str, took: Took) -> None:
    lay(tmp_path, ONE)
    pin = spool.open_pin(tmp_path, "checkpoint-3", 1, node)
    assert pin is not None
    shutil.copytree(tmp_path / "checkpoint-4", pin.root, dirs_exist_ok=True)
    spool.record(pin, took)
    assert [r.checkpoint for r in push_now(tmp_path, MemoryStore(), "n0", "run")] == ["checkpoint-4"]


def test_where_a_spool_is_a_daemon_can_say_again_what_a_push_said(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "_ckptsync").mkdir()
    for _ in "ab":
        push_now(lay(tmp_path, FINISHED), store, "n0", "run")
    [manifest] = (k.manifest for k in manifests(store))
    [took] = remembered(tmp_path, "checkpoint-4")
    assert {"settled": took.settled, "sending": took.sending} == manifest.times


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        (FINISHED, []),
        (TWO, [f"{ASSUMED}: no trainer_state.json yet"]),
        ({"rng_state_1.pth": b"random"}, [f"{ASSUMED}: nothing in it says that it is finished"]),
    ],
)
def test_what_nothing_proves_to_be_finished_is_sent_and_said_aloud(
    tmp_path: Path, files: dict[str, bytes], notes: list[str]
) -> None:
    store = MemoryStore()
    (result,) = push_now(lay(tmp_path, files), store, "n0", "run")
    assert list(result.notes) == notes
    assert push_now(tmp_path, store, "n0", "run")[0].notes == (), "nothing is sent, nothing is taken on a word"


def test_a_later_checkpoint_and_a_mate_s_manifest_prove_it(tmp_path: Path) -> None:
    shards = {"rng_state_1.pth": b"random"}
    lay(tmp_path / "b", shards, 60.0).rename(tmp_path / "b" / "checkpoint-5")
    results = push_now(lay(tmp_path / "b", shards).parent, MemoryStore(), "n1", "run")
    assert [bool(r.notes) for r in results] == [False, True]
    store = MemoryStore()
    push_now(lay(tmp_path / "a", FINISHED), store, "n0", "run")
    assert push_now(lay(tmp_path / "c", shards), store, "n1", "run")[0].notes == ()


def test_only_what_was_chosen_is_sent_and_what_is_demanded_says_so(tmp_path: Path) -> None:
    store, chosen = MemoryStore(), Selection("no-optimizer", exclude=("rng*",))
    lay(tmp_path, {**FINISHED, "rng_state.pth": b"random"})
    assert [len(sizes) for _, sizes in planned(offered(tmp_path), "n0", chosen)] == [2]
    push_now(tmp_path, store, "n0", "run", selection=chosen)
    assert set(kept(store)["checkpoint-4"]["n0"]) == {"model.safetensors", "trainer_state.json"}
    (again,) = push_now(tmp_path, store, "n0", "run", selection=chosen)
    assert again.files == 0


def test_in_a_daemon_s_output_directory_names_are_those_that_the_daemon_gives(tmp_path: Path) -> None:
    trial = tmp_path / "out" / "run-0"
    source = lay(trial, FINISHED)
    runs = (RunDir("other", tmp_path), RunDir("sft", tmp_path / "out"))
    for directory in (source, trial, tmp_path / "out"):
        offer = offered(directory, runs)
        assert (offer.run, offer.root, [s.name for s in offer.spots]) == ("sft", tmp_path / "out", ["run-0.checkpoint-4"])
    alone = offered(source)
    assert (alone.run, alone.root, [s.name for s in alone.spots]) == ("run-0", trial, ["checkpoint-4"])
    assert offered(tmp_path / "out", (RunDir("deep", trial),)).run == "out"
