"""Sending: whole or not at all, once, and never two saves in one place, whoever dies and in whatever order they come."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.records.coding import decode
from ckptsync.records.manifest import Manifest
from ckptsync.records.names import parse_record_name
from ckptsync.records.saves import Known, live, locate, save_of
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import push_now
from tests.dying import Crash, Dying
from tests.vector import vector

T = 1_700_000_000 * 10**9


def lay(root: Path, files: dict[str, bytes], at: float = 0.0) -> Path:
    """A checkpoint whose files were written at ``at`` seconds, in place."""
    for name, content in files.items():
        path = root / "checkpoint-4" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(T + int(at * 1e9), T + int(at * 1e9) + len(name)))
        for folder in (path.parent, root / "checkpoint-4"):
            os.utime(folder, ns=(T + int(at * 1e9),) * 2)
    return root / "checkpoint-4"


def manifests(store: Store) -> list[Known]:
    names = [e.name for e in store.names("") if (parsed := parse_record_name(e.name)) and parsed.kind == "manifest"]
    return list(live(Known(n, decode(n, read_all(store, n), Manifest)) for n in names))


def kept(store: Store) -> dict[str, dict[str, dict[str, bytes]]]:
    """Location → node → path → bytes, as the manifests say.  Fails if a bound file is not there, or has other bytes."""
    told: dict[str, dict[str, dict[str, bytes]]] = {}
    for location in {k.manifest.location for k in manifests(store)}:
        assert save_of(location, manifests(store)) == ""
        for path, every in locate(k.manifest for k in manifests(store) if k.manifest.location == location).items():
            for at in every:
                data = read_all(store, at.name)
                assert digest(data) == at.entry.digest, at.name
                for node in at.nodes:
                    told.setdefault(location, {}).setdefault(node, {})[path] = data
    return told


ONE = {"trainer_state.json": b'{"global_step": 4}', "m/__0_0.distcp": b"shard 0", "m/meta.txt": b"meta", "empty": b"", "x": b"A"}
TWO = {"m/__1_0.distcp": b"shard 1", "x": b"B", "rng_state_1.pth": b"random"}


def other(files: dict[str, bytes]) -> dict[str, bytes]:
    """Another save: the same names and sizes, other bytes."""
    return {
        name: bytes(b ^ 1 if b != 10 else b for b in content) if "json" not in name else content for name, content in files.items()
    }


def test_a_checkpoint_lies_in_the_store_under_its_own_names(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    (result,) = push_now(lay(tmp_path / "run", ONE), store, "n0")
    assert (result.phase, result.location, result.files) == ("sent", "checkpoint-4", 5)
    assert (tmp_path / "store/run/checkpoint-4/m/__0_0.distcp").read_bytes() == b"shard 0"
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}
    assert push_now(tmp_path / "run", store, "n0")[0].files == 0
    assert len(manifests(store)) == 1


def test_a_push_says_nothing_of_pins_which_it_never_makes(tmp_path: Path) -> None:
    (told,) = push_now(lay(tmp_path, {"a": b"1"}), MemoryStore(), "n", "run")
    assert "pin" not in "".join(told.notes)


def test_real_shards_of_two_nodes_become_one_save(tmp_path: Path) -> None:
    store = MemoryStore()
    for n, source in enumerate(vector("hf-fsdp2-2node").sources):
        shutil.copytree(source, tmp_path / f"n{n}" / "run" / "checkpoint-4", copy_function=shutil.copyfile)
        for path in (tmp_path / f"n{n}").rglob("*.*"):
            os.utime(path, ns=(T, T))
        push_now(tmp_path / f"n{n}" / "run", store, f"n{n}")
    told = kept(store)["checkpoint-4"]
    assert set(told) == {"n0", "n1"}
    demanded = set().union(*(k.manifest.demands.model for k in manifests(store)))
    assert demanded
    assert demanded <= told["n0"].keys() | told["n1"].keys()


def test_killed_at_any_moment_it_is_finished_by_the_next_and_opens_no_second_location(tmp_path: Path) -> None:
    source = lay(tmp_path / "run", ONE)
    for lives in itertools.count():
        store = MemoryStore()
        try:
            push_now(source, Dying(store, lives), "n0")
        except Crash:
            kept(store)
            push_now(source, store, "n0")
        else:
            break
        assert kept(store) == {"checkpoint-4": {"n0": ONE}}
        assert len(manifests(store)) == 1
    assert lives > 3 * len(ONE)


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


def test_a_save_written_over_another_goes_to_another_location(tmp_path: Path) -> None:
    store = MemoryStore()
    push_now(lay(tmp_path / "run", ONE), store, "n0")
    (result,) = push_now(lay(tmp_path / "run", other(ONE), 5000.0), store, "n0")
    assert result.location.startswith("checkpoint-4~")
    assert kept(store) == {"checkpoint-4": {"n0": ONE}, result.location: {"n0": other(ONE)}}


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(["A0", "A1", "B0", "B1"]))), ids="-".join)
def test_two_saves_of_two_nodes_never_mix_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    store = MemoryStore()
    content = {"A0": ONE, "B0": TWO, "A1": other(ONE), "B1": other(TWO)}
    sources = {key: lay(tmp_path / key / "run", files, 5000.0 * int(key[1])) for key, files in content.items()}
    for key in (*order, *order):
        push_now(sources[key], store, key[0])
    assert sorted(kept(store).values(), key=lambda n: n["A"]["x"] != b"A") == [
        {"A": ONE, "B": TWO},
        {"A": other(ONE), "B": other(TWO)},
    ]


class Interrupted:
    """A store in front of another; something happens there just before the ``nth`` change that is made through it."""

    def __init__(self, store: Store, nth: int, meddle: Callable[[], object]) -> None:
        self.url, self._store, self._left, self._meddle = store.url, store, nth, meddle
        self.late, self.is_exclusive = store.late, store.is_exclusive
        self.names, self.dirs, self.size, self.read_into, self.delete = (
            store.names,
            store.dirs,
            store.size,
            store.read_into,
            store.delete,
        )

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._count()
        self._store.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._count()
        self._store.create(name, chunks, about)

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._meddle()


def or_waits(source: Path, store: Store, node: str) -> None:
    """A push that may find a name taken by a node that is still sending."""
    with contextlib.suppress(Incomplete):
        push_now(source, store, node)


@pytest.mark.parametrize(("node", "files", "at"), [("a", TWO, 0.5), ("z", TWO, 0.5), ("a", TWO, 5000.0), ("z", TWO, 5000.0)])
def test_another_node_that_comes_in_between_at_any_moment_mixes_nothing(
    tmp_path: Path, node: str, files: dict[str, bytes], at: float
) -> None:
    source, another = lay(tmp_path / "m" / "run", ONE), lay(tmp_path / node / "run", files, at)
    for nth in range(3 * len(ONE)):
        store = MemoryStore()
        for n in (nth, 99):
            push_now(source, Interrupted(store, n, lambda s=store: or_waits(another, s, node)), "m")  # type: ignore[misc]
            push_now(another, store, node)
        told = kept(store).values()
        assert sorted((n, f == (ONE if n == "m" else files)) for location in told for n, f in location.items()) == sorted(
            [("m", True), (node, True)]
        ), nth
        assert len(told) == (1 if at < 1 else 2), nth


def test_late_files_are_a_further_manifest_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path / "run", ONE)
    push_now(source, store, "n0")
    lay(tmp_path / "run", {"rng_state_0.pth": b"late!"}, 1.0)
    assert push_now(source, store, "n0")[0].files == 1
    assert sorted((k.manifest.n, len(k.manifest.files)) for k in manifests(store)) == [(0, 5), (1, 1)]


def test_litter_under_a_name_is_replaced_and_what_a_killed_try_left_is_not_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("run/checkpoint-4/x", [b"litter"])
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
def test_where_names_cannot_be_claimed_it_says_that_another_look_is_needed(tmp_path: Path, *, is_exclusive: bool) -> None:
    store = MemoryStore()
    store.is_exclusive = is_exclusive
    store.write("run/.ckptsync/checkpoint-4/sending/n1", [b"sending"])
    (told,) = push_now(lay(tmp_path / "run", ONE), store, "n0")
    assert [("push again" in note) for note in told.notes] == [True] * (not is_exclusive)


def test_what_changes_while_it_is_sent_is_never_committed(tmp_path: Path) -> None:
    for strike in range(1, len(ONE)):  # one of them is empty
        store, calls = MemoryStore(), itertools.count(1)
        source = lay(tmp_path / "run", ONE)

        def passed(_: int, strike: int = strike, calls: itertools.count[int] = calls, source: Path = source) -> None:
            if next(calls) == strike:
                (source / "m" / "__0_0.distcp").write_bytes(b"SHARD 0")

        with pytest.raises(Incomplete):
            push_now(source, store, "n0", passed=passed)
        assert manifests(store) == []


def test_links_are_neither_followed_nor_sent_and_it_says_so(tmp_path: Path) -> None:
    source = lay(tmp_path / "run", ONE)
    (source / "link").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("/etc")
    store = MemoryStore()
    (result,) = push_now(source, store, "n0")
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}
    assert "2 links" in result.notes[0]


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


def test_a_file_of_lightning_s_and_a_final_model_are_pushed_without_what_lies_beside_them(tmp_path: Path) -> None:
    store, out = MemoryStore(), tmp_path / "run"
    whole = (vector("verl-fsdp2").sources[0] / "actor" / "model_world_size_3_rank_0.pt").read_bytes()
    (out / "lightning_logs" / "version_0" / "checkpoints").mkdir(parents=True)
    (out / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=5.ckpt").write_bytes(whole)
    for path in (vector("hf-sharded").sources[0]).iterdir():
        shutil.copyfile(path, out / path.name)
    (out / "train.log").write_text("on and on")
    assert {p.location for p in push_now(out, store, "n0")} == {"final", "version_0.epoch-0-step-5.ckpt"}
    assert kept(store)["version_0.epoch-0-step-5.ckpt"]["n0"].keys() == {"epoch=0-step=5.ckpt"}
    assert kept(store)["final"]["n0"].keys() == {p.name for p in vector("hf-sharded").sources[0].iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_a_checkpoint_beside_another_users_spool_is_sent_and_the_spool_left_alone(tmp_path: Path) -> None:
    lay(tmp_path / "run", ONE)
    (tmp_path / "run" / "_ckptsync" / "pins" / "checkpoint-2.0" / "files").mkdir(parents=True)
    os.chown(tmp_path / "run" / "_ckptsync", 65534, 65534)
    (done,) = push_now(tmp_path / "run", MemoryStore())
    assert done.phase == "sent"
    assert "_ckptsync: belongs to uid 65534" in done.notes[-1]
