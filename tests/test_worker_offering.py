"""A push sends what a daemon would send, and says what a daemon would say; what it takes on the user's word, it says aloud."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.spool import pins as spool
from ckptsync.spool.marks import Begun, RankMark, Took, begun_path, save_folder, write_mark
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.options import RunDir
from ckptsync.worker.push import ASSUMED, offered, planned, push_now
from ckptsync.worker.remembering import kept_of
from ckptsync.worker.selecting import EVERYTHING, Selection
from tests.cli.test_push import FSDP
from tests.hook_pins import commit
from tests.test_worker_push import ONE, TWO, T, kept, lay, manifests
from tests.vector import Vector, vectors

FINISHED = {"model.safetensors": b"\2\0\0\0\0\0\0\0{}", "optimizer.pt": b"states", "trainer_state.json": b'{"global_step": 4}'}


def told(store: MemoryStore) -> list[tuple[str, str]]:
    """The save's id and the trainer of each manifest."""
    return [(k.manifest.save, k.manifest.trainer) for k in manifests(store)]


def test_a_push_s_manifest_says_who_wrote_the_save_and_when_it_was_finished_and_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    push_now(lay(tmp_path, FINISHED), store, "n0")
    [manifest] = (k.manifest for k in manifests(store))
    assert manifest.trainer == "trainer"
    assert 0 < manifest.times["finished"] <= manifest.times["sending"]
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
    took = kept_of(tmp_path, "checkpoint-4")[0].took
    assert {"finished": took.finished, "sending": took.sending} == manifest.times


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
    assert [(one.files, one.left_out) for one in planned(offered(tmp_path), "n0", chosen)] == [
        (2, ("optimizer.pt", "rng_state.pth"))
    ]
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


@pytest.mark.parametrize("vector", [v for v in vectors() if v.name != "lightning-file"], ids=lambda v: v.name)
def test_every_layout_is_sent_whole_whatever_its_directory_is_called(vector: Vector, tmp_path: Path) -> None:
    for at, source in enumerate(vector.sources):
        directory = tmp_path / f"n{at}" / "some-save"
        shutil.copytree(source, directory)
        told = planned(offered(directory, name="mine"), "n0", EVERYTHING)
        files = [p for p in directory.rglob("*") if p.is_file()]
        assert [(one.run, one.checkpoint, one.files, one.left_out) for one in told] == [(f"n{at}", "mine", len(files), ())]
        unnamed = offered(directory)
        sent = sum(one.files for one in planned(unnamed, "n0", EVERYTHING))
        assert sent + len(unnamed.left_out) == len(files)
        assert set(unnamed.left_out) <= {"latest", "latest_universal"}, "what DeepSpeed writes beside its tags, and pull makes"


def test_a_copy_of_a_checkpoint_is_one_and_wants_a_name_that_a_store_can_keep(tmp_path: Path) -> None:
    lay(tmp_path, FINISHED).rename(tmp_path / "checkpoint-4 (copy)")
    with pytest.raises(ConfigError, match="cannot keep a checkpoint under the name") as raised:
        offered(tmp_path / "checkpoint-4 (copy)")
    assert "--as checkpoint-4" in raised.value.hint
    store = MemoryStore()
    push_now(tmp_path / "checkpoint-4 (copy)", store, "n0", name="checkpoint-4")
    assert kept(store) == {"checkpoint-4": {"n0": FINISHED}}


def test_states_or_a_name_tell_a_checkpoint_from_an_output_directory(tmp_path: Path) -> None:
    model = {"model.safetensors": FINISHED["model.safetensors"]}
    lay(tmp_path, FINISHED).rename(tmp_path / "best")
    lay(tmp_path, model).rename(tmp_path / "checkpoint-4.bak")
    lay(tmp_path, {**model, "train.log": b"x", "runs/a": b"y"}).rename(tmp_path / "sft")
    told = {name: offered(tmp_path / name) for name in ("best", "checkpoint-4.bak", "sft")}
    assert {n: (o.run == n, [s.name for s in o.spots], o.left_out) for n, o in told.items()} == {
        "best": (False, ["best"], ()),
        "checkpoint-4.bak": (False, ["checkpoint-4.bak"], ()),
        "sft": (True, ["final"], ("runs/", "train.log")),
    }


def test_what_a_worker_watches_keeps_the_name_that_the_worker_gives_it(tmp_path: Path) -> None:
    root = lay(tmp_path, FINISHED).rename(tmp_path / "out")
    assert [s.name for s in offered(root, (RunDir("sft", root),)).spots] == ["final"]


def test_a_link_is_followed_where_it_is_named_and_shown_where_it_is_found(tmp_path: Path) -> None:
    shutil.copytree(FSDP / "node0/checkpoint-4/pytorch_model_fsdp_0", tmp_path / "dcp")
    lay(tmp_path / "out", FINISHED)
    links = tmp_path / "links"
    links.mkdir()
    (links / "last").symlink_to(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(ConfigError, match="behind a link, last") as raised:
        offered(links)
    assert f"ckptsync push {links}/last" in raised.value.hint
    (links / "checkpoint-9").symlink_to(tmp_path / "dcp")
    told = [offered(links / name) for name in ("last", "checkpoint-9")]
    assert [(o.run, o.spots[0].name, o.left_out) for o in told] == [("out", "checkpoint-4", ()), ("links", "checkpoint-9", ())]
    told = [offered(links / "checkpoint-9", (RunDir("mine", links),)), offered(tmp_path / "dcp")]
    assert [(o.run, o.spots[0].name) for o in told] == [("mine", "checkpoint-9"), (tmp_path.name, "dcp")]


@pytest.mark.parametrize(
    ("name", "said"),
    [("two", "holds checkpoint-4"), ("..", "holds checkpoint-4"), ("a/b", "cannot keep"), ("consolidated", "cannot keep")],
)
def test_a_name_is_one_checkpoint_s_and_one_that_a_store_can_keep(name: str, said: str, tmp_path: Path) -> None:
    source = lay(tmp_path, FINISHED)
    with pytest.raises(ConfigError, match=said):
        offered(source if "cannot" in said else tmp_path, name=name)


def test_a_store_in_what_the_user_calls_a_checkpoint_is_refused(tmp_path: Path) -> None:
    source = lay(tmp_path, FINISHED).rename(tmp_path / "best")
    with pytest.raises(ConfigError, match="lies inside a checkpoint"):
        push_now(source, create_store(str(source / "store")), "n0")
