"""ckptsync push: what it offers, what it judges, and what it sends."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.records.save_decisions import Tombstone
from ckptsync.spool import pins as spool
from ckptsync.spool.markers import (
    PinNotes,
    RankMark,
    TrainingProcess,
    process_path,
    save_folder,
    write_mark,
)
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.file_selection import Selection
from ckptsync.worker.options import RunDir
from ckptsync.worker.push import ASSUMED, find_offer, plan_push
from tests.support.crashing_store import Crash, Dying
from tests.support.filled_stores import put
from tests.support.hook_pins import commit
from tests.support.worker_in_process import (
    ONE,
    TWO,
    Interrupted,
    T,
    kept,
    lay,
    manifests,
    other,
    push_now,
)


def test_the_second_node_killed_at_any_moment_leaves_the_first_whole(tmp_path: Path) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        for lives in itertools.count():
            store = MemoryStore()
            push_now(lay(tmp_path / f"1{first}" / "run", ONE), store, first)
            source = lay(tmp_path / f"2{second}" / "run", TWO, 0.5)
            try:
                push_now(source, Dying(store, lives), second)
            except Crash:
                push_now(source, store, second)
            else:
                break
            push_now(tmp_path / f"1{first}" / "run", store, first)
            assert kept(store) == {"checkpoint-4": {first: ONE, second: TWO}}
        assert lives > 3 * len(TWO)


@pytest.mark.parametrize(
    "order", sorted(set(itertools.permutations(["A0", "A1", "B0", "B1"]))), ids="-".join
)
def test_saves_of_two_nodes_never_mix_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    store = MemoryStore()
    content = {"A0": ONE, "B0": TWO, "A1": other(ONE), "B1": other(TWO)}
    sources = {
        key: lay(tmp_path / key / "run", files, 5000.0 * int(key[1]))
        for key, files in content.items()
    }
    for key in (*order, *order):
        push_now(sources[key], store, key[0])
    assert sorted(kept(store).values(), key=lambda n: n["A"]["x"] != b"A") == [
        {"A": ONE, "B": TWO},
        {"A": other(ONE), "B": other(TWO)},
    ]


def or_waits(source: Path, store: Store, node: str) -> None:
    """A push that may find a name taken by a node that is still sending."""
    with contextlib.suppress(Incomplete):
        push_now(source, store, node)


@pytest.mark.parametrize(
    ("node", "files", "at"),
    [("a", TWO, 0.5), ("z", TWO, 0.5), ("a", TWO, 5000.0), ("z", TWO, 5000.0)],
)
def test_a_node_that_comes_in_between_at_any_moment_mixes_nothing(
    tmp_path: Path, node: str, files: dict[str, bytes], at: float
) -> None:
    source, another = lay(tmp_path / "m" / "run", ONE), lay(tmp_path / node / "run", files, at)
    for nth in range(3 * len(ONE)):
        store = MemoryStore()
        for n in (nth, 99):
            push_now(source, Interrupted(store, n, lambda s=store: or_waits(another, s, node)), "m")  # type: ignore[misc]
            push_now(another, store, node)
        told = kept(store).values()
        assert sorted(
            (n, f == (ONE if n == "m" else files)) for location in told for n, f in location.items()
        ) == sorted([("m", True), (node, True)]), nth
        assert len(told) == (1 if at < 1 else 2), nth


def test_late_files_are_a_further_manifest_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path / "run", ONE)
    push_now(source, store, "n0")
    lay(tmp_path / "run", {"rng_state_0.pth": b"late!"}, 1.0)
    assert push_now(source, store, "n0")[0].files == 1
    files_by_number = sorted((k.manifest.n, len(k.manifest.files)) for k in manifests(store))
    assert files_by_number == [(0, 5), (1, 1)]


def test_orphaned_bytes_are_replaced_and_those_of_a_killed_try_used(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("run/checkpoint-4/x", [b"orphan"])
    store.write("run/checkpoint-4/m/meta.txt", [b"meta"])
    assert push_now(lay(tmp_path / "run", ONE), store, "n0")[0].files == len(ONE) - 1
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_a_file_whose_name_another_node_is_sending_lies_beside(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("run/checkpoint-4/x", [b"B"])
    store.write("run/.ckptsync/checkpoint-4/sending/n1", [b"sending"])
    push_now(lay(tmp_path / "run", ONE), store, "n0")
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}
    push_now(lay(tmp_path / "n1" / "run", TWO), store, "n1")
    assert kept(store) == {"checkpoint-4": {"n0": ONE, "n1": TWO}}
    assert read_all(store, "run/checkpoint-4/x") == TWO["x"]


@pytest.mark.parametrize("is_exclusive", [True, False])
def test_where_no_name_can_be_claimed_it_says_push_again(
    tmp_path: Path, *, is_exclusive: bool
) -> None:
    store = MemoryStore()
    store.is_exclusive = is_exclusive
    store.write("run/.ckptsync/checkpoint-4/sending/n1", [b"sending"])
    (told,) = push_now(lay(tmp_path / "run", ONE), store, "n0")
    assert [("push again" in note) for note in told.notes] == [True] * (not is_exclusive)


def test_what_cannot_be_pushed_is_refused_with_a_reason(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match="no checkpoint in it"):
        push_now(tmp_path, store, "n0")
    with pytest.raises(ConfigError, match="no such directory"):
        push_now(tmp_path / "nothing", store, "n0")
    source = lay(tmp_path / "run", ONE)
    with pytest.raises(ConfigError, match="inside a checkpoint"):
        push_now(source, create_store(str(source / "store")), "n0")
    (source / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(Incomplete, match="checkpoint-is-incomplete"):
        push_now(source, store, "n0")
    assert list(store.names("")) == []


def test_one_bad_checkpoint_does_not_keep_the_others_back(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path / "run", ONE)
    (tmp_path / "run" / "checkpoint-2").mkdir()
    with pytest.raises(Incomplete, match="checkpoint-2: holds no file"):
        push_now(tmp_path / "run", store, "n0")
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_what_was_given_up_or_has_a_broken_record_is_not_pushed(tmp_path: Path) -> None:
    store, source = MemoryStore(), lay(tmp_path / "run", ONE)
    broken = "run/.ckptsync/checkpoint-4/manifest-n0-0-0123456789abcdef.json"
    store.write(broken, [b"{"])
    with pytest.raises(Corrupt):
        push_now(source, store, "n0")
    store.delete(broken)
    push_now(source, store, "n0")
    names = tuple(k.name for k in manifests(store))
    put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, names, "old"))
    store.delete("run/checkpoint-4/x")
    assert [p.phase for p in push_now(source, store, "n0")] == ["retired"]
    assert "run/checkpoint-4/x" not in [e.name for e in store.names("")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_a_checkpoint_beside_another_users_spool_is_sent(tmp_path: Path) -> None:
    lay(tmp_path / "run", ONE)
    (tmp_path / "run" / "_ckptsync" / "pins" / "checkpoint-2.0" / "files").mkdir(parents=True)
    os.chown(tmp_path / "run" / "_ckptsync", 65534, 65534)
    (done,) = push_now(tmp_path / "run", MemoryStore())
    assert done.phase == "sent"
    assert "_ckptsync: belongs to uid 65534" in done.notes[-1]


FINISHED = {
    "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
    "optimizer.pt": b"states",
    "trainer_state.json": b'{"global_step": 4}',
}


def told(store: MemoryStore) -> list[tuple[str, str]]:
    """The save's id and the trainer of each manifest."""
    return [(k.manifest.save, k.manifest.trainer) for k in manifests(store)]


def test_a_push_s_manifest_says_who_wrote_the_save_and_when(tmp_path: Path) -> None:
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
    assert spool.list_pins(tmp_path)[0].stored, "who waits for it is told"


def test_marks_of_all_ranks_give_the_save_its_id_where_nobody_pinned_it(tmp_path: Path) -> None:
    store, files = MemoryStore(), tmp_path / "_ckptsync"
    lay(tmp_path, FINISHED)
    process = TrainingProcess("t", 0, 1, 1, "h", 1, "1", "b", T / 1e9 - 9)
    write_mark(process_path(files, "p"), process)
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
    assert [r.checkpoint for r in results] == ["checkpoint-5", "checkpoint-4"]
    assert {r.phase for r in results} == {"sent"}
    assert kept(store)["checkpoint-4"]["n0"] == FINISHED
    assert [r.checkpoint for r in push_now(tmp_path, store, "n0", "run")] == ["checkpoint-5"]


def test_a_save_that_was_written_over_is_sent_from_its_pin(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, FINISHED)
    commit(source, "s1")
    shutil.rmtree(source)
    lay(tmp_path, {**FINISHED, "optimizer.pt": b"others"}, 5000.0)
    push_now(tmp_path, store, "n0", "run")
    states = sorted(files["n0"]["optimizer.pt"] for files in kept(store).values())
    assert states == [b"others", b"states"]
    assert sorted(told(store)) == [("", "trainer"), ("s1", "hf")]


def test_a_pin_that_was_overwritten_in_place_since_the_hook_made_it_is_not_sent(
    tmp_path: Path,
) -> None:
    source = lay(tmp_path, FINISHED)
    commit(source)
    (source / "optimizer.pt").write_bytes(b"half")
    shutil.rmtree(source)
    lay(tmp_path, ONE).rename(tmp_path / "checkpoint-5")
    results = push_now(tmp_path, MemoryStore(), "n0", "run")
    assert [r.checkpoint for r in results] == ["checkpoint-5"]


def test_what_the_trainer_took_back_from_an_unfinished_save_is_not_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    pin = spool.create_pin(tmp_path, "checkpoint-4", 1, "n0")
    assert pin is not None
    shutil.copytree(lay(tmp_path, {**FINISHED, "placeholder": b"x"}), pin.root, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "placeholder").unlink()
    push_now(tmp_path, store, "n0", "run")
    assert kept(store)["checkpoint-4"]["n0"] == FINISHED


@pytest.mark.parametrize(("node", "took"), [("other", PinNotes(stable=1)), ("n0", PinNotes())])
def test_what_another_node_pinned_and_what_nobody_saw_whole_stays_where_it_is(
    tmp_path: Path, node: str, took: PinNotes
) -> None:
    lay(tmp_path, ONE)
    pin = spool.create_pin(tmp_path, "checkpoint-3", 1, node)
    assert pin is not None
    shutil.copytree(tmp_path / "checkpoint-4", pin.root, dirs_exist_ok=True)
    spool.write_pin_notes(pin, took)
    results = push_now(tmp_path, MemoryStore(), "n0", "run")
    assert [r.checkpoint for r in results] == ["checkpoint-4"]


def test_where_a_spool_is_a_daemon_can_write_the_manifest_of_a_push_again(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "_ckptsync").mkdir()
    for _ in "ab":
        push_now(lay(tmp_path, FINISHED), store, "n0", "run")
    [name] = (k.name for k in manifests(store))
    [copy] = (tmp_path / "_ckptsync/manifests/checkpoint-4").iterdir()
    assert (copy.name, copy.read_bytes()) == (name.rpartition("/")[2], read_all(store, name))


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        (FINISHED, []),
        (TWO, [f"{ASSUMED}: no trainer_state.json yet"]),
        ({"rng_state_1.pth": b"random"}, [f"{ASSUMED}: no file in it marks the end of a save"]),
    ],
)
def test_what_nothing_proves_to_be_finished_is_sent_and_said_aloud(
    tmp_path: Path, files: dict[str, bytes], notes: list[str]
) -> None:
    store = MemoryStore()
    (result,) = push_now(lay(tmp_path, files), store, "n0", "run")
    assert list(result.notes) == notes
    assert push_now(tmp_path, store, "n0", "run")[0].notes == (), (
        "nothing is sent, nothing is taken on a word"
    )


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
    lay(tmp_path, {**FINISHED, "rng_state.pth": b"random", ".tmpAb3xYz": b"half"})
    [planned] = plan_push(find_offer(tmp_path), "n0", chosen)
    assert (planned.files, planned.left_out) == (2, (".tmpAb3xYz", "optimizer.pt", "rng_state.pth"))
    push_now(tmp_path, store, "n0", "run", selection=chosen)
    assert set(kept(store)["checkpoint-4"]["n0"]) == {"model.safetensors", "trainer_state.json"}
    (again,) = push_now(tmp_path, store, "n0", "run", selection=chosen)
    assert again.files == 0


def test_in_a_daemon_s_output_directory_names_are_the_daemon_s(tmp_path: Path) -> None:
    out, trial = tmp_path / "out", tmp_path / "out" / "run-0"
    source = lay(trial, FINISHED)

    def offered(directory: Path, *runs: RunDir) -> tuple[str, Path, list[str]]:
        offer = find_offer(directory, runs)
        return offer.run, offer.root, [checkpoint.name for checkpoint in offer.found_dirs]

    for directory in (source, trial, out):
        runs = (RunDir("other", tmp_path), RunDir("sft", out))
        assert offered(directory, *runs) == ("sft", out, ["run-0.checkpoint-4"])
    assert offered(source) == ("run-0", trial, ["checkpoint-4"])
    assert offered(out, RunDir("deep", trial))[0] == "out"
    final = lay(tmp_path, FINISHED).rename(tmp_path / "model")
    assert offered(final, RunDir("sft", final))[2] == ["final"]


UNKNOWN = {
    "one file": ["weights.npz"],
    "orbax": ["_METADATA", "default/manifest.ocdbt", "default/d/0a1b"],
    "megatron": ["latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/model_optim_rng.pt"],
    "nested": ["a/b/c/weights", "x.nemo", ".hidden"],
    "checkpoints of one file": ["one.ckpt", "two.ckpt", "config.yaml"],
}


@pytest.mark.parametrize("layout", UNKNOWN)
def test_what_no_layout_reads_is_sent_under_the_users_name(layout: str, tmp_path: Path) -> None:
    directory, store = tmp_path / "run" / "some-save", MemoryStore()
    for name in UNKNOWN[layout]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode())
    (directory / "empty").mkdir()
    (sent,) = push_now(directory, store, "n0", name="mine")
    assert (sent.run, sent.location, sent.left_out) == ("run", "mine", ())
    assert kept(store) == {"mine": {"n0": {name: name.encode() for name in UNKNOWN[layout]}}}


def test_states_or_a_name_tell_a_checkpoint_from_an_output_directory(tmp_path: Path) -> None:
    model = {"model.safetensors": FINISHED["model.safetensors"]}
    lay(tmp_path, FINISHED).rename(tmp_path / "best")
    lay(tmp_path, model).rename(tmp_path / "checkpoint-4.bak")
    lay(tmp_path, {**model, "train.log": b"x", "runs/a": b"y"}).rename(tmp_path / "sft")
    (tmp_path / "linked").symlink_to("best")
    names = ("best", "checkpoint-4.bak", "linked", "sft")
    told = {name: find_offer(tmp_path / name) for name in names}
    assert {
        n: (o.run == n, [s.name for s in o.found_dirs], o.left_out) for n, o in told.items()
    } == {
        "best": (False, ["best"], ()),
        "checkpoint-4.bak": (False, ["checkpoint-4.bak"], ()),
        "linked": (False, ["linked"], ()),
        "sft": (True, ["final"], ("runs/", "train.log")),
    }


@pytest.mark.parametrize("name", ["two", "..", "a/b", "consolidated"])
def test_a_name_is_one_checkpoint_s_and_one_that_a_store_can_keep(
    name: str, tmp_path: Path
) -> None:
    source, is_plain = lay(tmp_path, FINISHED), name in ("two", "..")
    with pytest.raises(ConfigError, match="contains" if is_plain else "cannot keep"):
        find_offer(tmp_path if is_plain else source, name=name)


def test_what_rotation_has_only_begun_to_take_is_sent_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    commit(lay(tmp_path, FINISHED), "s1")
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    (result,) = push_now(tmp_path, store, "n0", "run")
    assert (kept(store)["checkpoint-4"]["n0"], result.notes) == (FINISHED, ())
