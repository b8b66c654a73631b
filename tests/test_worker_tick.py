"""The worker as a whole, tick by tick: what trainers do to it, what stores do to it, and what it never does."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, StoreError
from ckptsync.records.coding import Record, encode, record_name
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import Finding, Report
from ckptsync.records.tombstone import Tombstone
from ckptsync.spool import pins
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Entry, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.result import Progress, WorkerResult
from ckptsync.worker.worker import Worker
from tests.dying import Crash, Dying
from tests.test_worker_push import ONE, TWO, T, kept, lay, manifests, other
from tests.vector import vector

EIGHT = ONE | {"trainer_state.json": b'{"global_step": 8}'}


def worker(out: Path, store: Store, node: str = "n0", *, keep: int = 2, threads: int = 4) -> Worker:
    return Worker(WorkerOptions(node, (RunDir("run", out),), keep_pins=keep, threads=threads), store)


def settle(w: Worker, start: float = 0.0) -> WorkerResult:
    """Ticks until everything that can be finished is, the last one after all waiting."""
    for after in (0.0, 10.0, 60.0, 600.0):
        result = w.tick(start + after)
    return result


def progress(result: WorkerResult) -> dict[str, Progress]:
    assert result.failures == ()
    return {f"{p.checkpoint}.{p.k}": p for p in result.progress}


def put(store: Store, record: Record) -> str:
    data = encode(record)
    store.create(record_name(record, data), [data])
    return record_name(record, data)


def pinned(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "_ckptsync" / "pins").iterdir())


def test_a_checkpoint_is_sent_when_it_is_quiet_and_then_left_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE | {"rng_state_0.pth": b"random"})
    lay(tmp_path, {"trainer_state.json": ONE["trainer_state.json"]}, 1.0)
    w = worker(tmp_path, store)
    first = progress(w.tick(100.0))["checkpoint-4.0"]
    assert (first.phase, first.detail) == (
        "waiting",
        "trainer_state.json is the newest of its files; finished if nothing changes for 10 s",
    )
    assert w.tick(109.9).queue == ("run/checkpoint-4",)
    result = w.tick(110.0)
    assert (progress(result)["checkpoint-4.0"].phase, result.queue) == ("sent", ())
    assert progress(w.tick(111.0))["checkpoint-4.0"].phase == "stored"
    assert kept(store)["checkpoint-4"]["n0"].keys() == ONE.keys() | {"rng_state_0.pth"}


def test_two_nodes_with_real_shards_make_one_save_in_a_real_store(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    for n, source in enumerate(vector("hf-zero3-2node").sources):
        shutil.copytree(source, tmp_path / f"n{n}" / "checkpoint-4", copy_function=shutil.copyfile)
    workers = [worker(tmp_path / f"n{n}", store, f"n{n}") for n in range(2)]
    for now in (0.0, 60.0, 600.0):
        for w in workers:
            progress(w.tick(now))
    assert set(kept(store)["checkpoint-4"]) == {"n0", "n1"}
    assert (tmp_path / "store/run/checkpoint-4/global_step4/zero_pp_rank_3_mp_rank_00_optim_states.pt").is_file()


def test_rotation_before_it_is_finished_takes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    assert [progress(w.tick(now))["checkpoint-4.0"].phase for now in (0.0, 0.5)] == ["waiting", "waiting"]
    shutil.rmtree(source)
    assert progress(worker(tmp_path, store).tick(1.0))["checkpoint-4.0"].phase == "sent"
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


class Meddling(MemoryStore):
    """A store in whose first write something happens elsewhere."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self._meddle: Callable[[], object] | None = meddle

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()
        super().create(name, chunks, about)


def test_rotation_while_it_is_being_sent_takes_nothing(tmp_path: Path) -> None:
    store = Meddling(lambda: shutil.rmtree(tmp_path / "checkpoint-4"))
    lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    assert not (tmp_path / "checkpoint-4").exists()
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_what_comes_and_goes_during_a_long_send_is_pinned(tmp_path: Path) -> None:
    lay(tmp_path, ONE)

    def save_and_rotate() -> None:
        lay(tmp_path / "next", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
        w.look(700.0)
        w.look(700.5)
        shutil.rmtree(tmp_path / "checkpoint-8")

    store = Meddling(save_and_rotate)
    w = worker(tmp_path, store, threads=1)
    settle(w)
    assert pinned(tmp_path) == ["checkpoint-4.0", "checkpoint-8.0"]
    assert kept(store) == {"checkpoint-4": {"n0": ONE}, "checkpoint-8": {"n0": EIGHT}}


def test_a_node_of_shards_follows_a_mate_of_the_same_save_at_once(tmp_path: Path) -> None:
    store = MemoryStore()
    shards = {name: content for name, content in TWO.items() if name != "x"}
    for n, (node, files) in enumerate({"a": ONE, "b": shards}.items()):
        lay(tmp_path / node, files, n / 2)
    settle(worker(tmp_path / "a", store, "a"))
    w = worker(tmp_path / "b", store, "b")
    w.tick(0.0)
    assert "another node has stored its part" in progress(w.tick(1.0))["checkpoint-4.0"].detail
    assert progress(w.tick(10.0))["checkpoint-4.0"].phase == "sent"
    assert kept(store) == {"checkpoint-4": {"a": ONE, "b": shards}}


def test_written_over_in_location_while_it_is_sent_it_is_sent_again_whole(tmp_path: Path) -> None:
    store = Meddling(lambda: lay(tmp_path, other(ONE), 5000.0))
    lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    assert progress(settle(w, 1000.0))["checkpoint-4.0"].phase == "stored"
    assert kept(store) == {"checkpoint-4": {"n0": other(ONE)}}


def test_writing_over_in_location_restarts_the_wait(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    w.tick(0.0)
    lay(tmp_path, {"x": b"Z"}, 5000.0)
    for now in (59.0, 70.0, 600.0):
        assert progress(w.tick(now))["checkpoint-4.0"].phase == "waiting"
    assert manifests(store) == []


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_second_save_under_the_name_goes_elsewhere_and_the_first_is_untouched(tmp_path: Path, *, is_removed: bool) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    if is_removed:
        shutil.rmtree(source)
    lay(tmp_path, other(ONE), 5000.0)
    settle(w, 1000.0)
    locations = kept(store)
    assert locations.pop("checkpoint-4") == {"n0": ONE}
    assert list(locations.values()) == [{"n0": other(ONE)}]
    assert pinned(tmp_path) == (["checkpoint-4.0", "checkpoint-4.1"] if is_removed else ["checkpoint-4.0"])


def test_killed_at_any_moment_and_begun_again_with_nothing_it_is_finished(tmp_path: Path) -> None:
    for lives in itertools.count():
        out, store = tmp_path / str(lives), MemoryStore()
        lay(out, ONE)
        try:
            w = worker(out, Dying(store, lives))
            w.look(0.0)
            w.look(0.5)
            settle(w, 1.0)
        except Crash:
            kept(store)
            if lives % 2:
                shutil.rmtree(out / "_ckptsync")
            else:
                shutil.rmtree(out / "checkpoint-4")
            settle(worker(out, store))
        else:
            break
        assert kept(store) == {"checkpoint-4": {"n0": ONE}}
        assert len(manifests(store)) == 1
    assert lives > 3 * len(ONE)


def test_a_restarted_worker_reads_no_file_of_what_is_stored(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    shutil.rmtree(tmp_path / "_ckptsync")
    before = list(store.names(""))
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0)
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
    assert progress(worker(tmp_path, store).tick(0.0))["checkpoint-4.0"].phase == "stored"
    assert list(store.names("")) == before
    assert all(p.stat().st_atime_ns == 0 for p in source.rglob("*") if p.is_file() and p.suffix != ".json")  # no head to look at


def test_of_two_nodes_on_one_directory_one_sends(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    a, b = worker(tmp_path, store, "a"), worker(tmp_path, store, "b")
    for now in (0.0, 10.0, 60.0):
        a.tick(now)
        assert progress(b.tick(now))["checkpoint-4.0"].phase == "elsewhere"
    assert kept(store) == {"checkpoint-4": {"a": ONE}}
    shutil.rmtree(tmp_path / "_ckptsync")
    assert progress(settle(b, 100.0))["checkpoint-4.0"].phase == "elsewhere"
    assert kept(store) == {"checkpoint-4": {"a": ONE}}


def test_the_pin_of_a_node_without_a_pulse_is_taken_over_and_of_one_that_lives_is_not(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE | {"model.safetensors": b"torn"})
    a, b = worker(tmp_path, store, "a"), worker(tmp_path, store, "b")
    for now in range(0, 5000, 400):
        a.tick(0.0)
        for later in (0, 399):
            assert progress(b.tick(float(now + later)))["checkpoint-4.0"].phase == "elsewhere"
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "_ckptsync/pins/checkpoint-4.0/files")
    for now in range(5000, 7500, 400):
        b.tick(float(now))
    assert kept(store) == {"checkpoint-4": {"b": ONE}}


def damaged(store: Store, n: int, *names: str) -> str:
    told = tuple(k.name for k in manifests(store))
    findings = tuple(Finding("digest", name, "") for name in names)
    return put(store, Report("run", "checkpoint-4", "checkpoint-4", n, "digest", "damaged", told, "", 0, findings))


def test_a_damaged_file_is_sent_again_once_a_report_from_the_pin(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    shutil.rmtree(source)
    for n in range(2):
        store.write("run/checkpoint-4/x", [b"!"])
        report = damaged(store, n, "checkpoint-4/x", "checkpoint-4/nothing", "../x", "consolidated/checkpoint-4/x")
        (repaired,) = w.tick(1000.0).repairs
        assert (repaired.report, repaired.name, repaired.reason) == (report, "checkpoint-4/x", "")
        assert kept(store) == {"checkpoint-4": {"n0": ONE}}
        assert w.tick(1001.0).repairs == ()


class Counting(MemoryStore):
    """Counts the writes that were begun."""

    begun = 0

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.begun += 1
        super().write(name, chunks, about)


def test_bytes_that_are_gone_or_others_by_now_repair_nothing_and_it_says_so(tmp_path: Path) -> None:
    store = Counting()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    (source / "x").write_bytes(b"B")
    store.write("run/checkpoint-4/x", [b"!"])
    damaged(store, 0, "checkpoint-4/x")
    begun = store.begun
    (repaired,) = w.tick(1000.0).repairs
    assert (repaired.reason, store.begun) == ("this node no longer has its bytes", begun)
    assert read_all(store, "run/checkpoint-4/x") == b"!"


def test_a_copy_beside_the_checkpoint_is_repaired_too(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path / "a", ONE)
    lay(tmp_path / "b", TWO, 0.5)
    workers = [worker(tmp_path / n, store, n) for n in "ab"]
    for w in workers:
        settle(w)
    beside = ".ckptsync/checkpoint-4/files/b/x"
    store.delete(f"run/{beside}")
    damaged(store, 0, beside)
    results = [w.tick(2000.0) for w in workers]
    assert results[0].repairs == ()
    assert kept(store) == {"checkpoint-4": {"a": ONE, "b": TWO}}


def verify(store: Store, location: str = "checkpoint-4") -> None:
    names = tuple(k.name for k in manifests(store) if k.manifest.location == location)
    model_record = put(store, ModelRecord("run", location, location, 0, names, {}, (), ()))
    put(store, Report("run", location, location, 0, "digest", "ok", names, model_record, 1, ()))


@pytest.mark.parametrize(("keep", "left"), [(1, ["checkpoint-4.0"]), (0, [])])
def test_pins_stay_until_verified_and_then_the_newest_few(tmp_path: Path, keep: int, left: list[str]) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    w = worker(tmp_path, store, keep=keep)
    settle(w)
    w.tick(1000.0)
    assert pinned(tmp_path) == ["checkpoint-4.0"]
    verify(store)
    for now in (1001.0, 1002.0):
        assert progress(w.tick(now))["checkpoint-4.0"].phase == "stored"
        assert pinned(tmp_path) == left


class Refusing(MemoryStore):
    """A store that takes all but one checkpoint."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if "/checkpoint-8/" in name:
            raise StoreError("full")
        super().create(name, chunks, about)


@pytest.mark.parametrize(("free", "left"), [(10**9, ["checkpoint-4.0", "checkpoint-8.0"]), (0, ["checkpoint-8.0"])])
def test_stored_pins_give_way_to_the_next_save_and_unstored_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, left: list[str]
) -> None:
    store = Refusing()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    settle(w)
    shutil.rmtree(source)
    lay(tmp_path / "x", EIGHT, 50.0).rename(tmp_path / "checkpoint-8")
    monkeypatch.setattr(pins, "free_bytes", lambda _: free)
    w.tick(1000.0)
    w.tick(1000.5)
    shutil.rmtree(tmp_path / "checkpoint-8")
    w.tick(1001.0)
    assert pinned(tmp_path) == left


def test_what_was_given_up_is_not_sent_again_but_a_new_save_is(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    settle(worker(tmp_path, store))
    put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, tuple(k.name for k in manifests(store)), "old"))
    shutil.rmtree(tmp_path / "_ckptsync")
    assert progress(settle(worker(tmp_path, store)))["checkpoint-4.0"].phase == "retired"
    lay(tmp_path, other(ONE), 5000.0)
    assert progress(settle(worker(tmp_path, store)))["checkpoint-4.0"].phase == "stored"
    assert len(kept(store)) == 2


def test_one_checkpoint_that_cannot_be_sent_keeps_no_other_back(tmp_path: Path) -> None:
    store = MemoryStore()
    bad = lay(tmp_path, ONE)
    bad.rename(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "a\nb").write_text("hostile")
    lay(tmp_path, ONE, 50.0)
    result = settle(worker(tmp_path, store))
    assert [(f.checkpoint, f.error) for f in result.failures] == [("checkpoint-2", "Corrupt")]
    assert "has characters" in result.errors[0]
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_a_record_that_cannot_be_read_stops_its_checkpoint_only(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE).rename(tmp_path / "checkpoint-2")
    lay(tmp_path, ONE, 50.0)
    store.write("run/.ckptsync/checkpoint-2/manifest-n0-0-0123456789abcdef.json", [b"{"])
    result = settle(worker(tmp_path, store))
    assert [(f.checkpoint, f.error) for f in result.failures] == [("checkpoint-2", "Corrupt")]
    store.delete("run/.ckptsync/checkpoint-2/manifest-n0-0-0123456789abcdef.json")
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


class Away(MemoryStore):
    """A store that does not answer, until it does."""

    is_away = True

    def names(self, prefix: str) -> itertools.chain[Entry]:
        if self.is_away:
            raise StoreError("the network is away", hint="look at it")
        return itertools.chain(super().names(prefix))


def test_without_the_store_it_still_pins_and_later_sends(tmp_path: Path) -> None:
    store = Away()
    source = lay(tmp_path, ONE)
    w = worker(tmp_path, store)
    (failure,) = w.tick(0.0).failures
    assert (failure.run, failure.checkpoint, failure.error, failure.hint) == ("run", "", "StoreError", "look at it")
    w.tick(0.5)
    shutil.rmtree(source)
    store.is_away = False
    settle(w, 1.0)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_the_placeholder_that_zero_3_takes_back_is_not_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, {"config.json": b"{}", "model.safetensors": b"\2\0\0\0\0\0\0\0{}"})
    w = worker(tmp_path, store)
    w.tick(0.0)
    (source / "model.safetensors").unlink()
    lay(tmp_path, ONE, 1.0)
    settle(w, 1.0)
    assert kept(store) == {"checkpoint-4": {"n0": ONE | {"config.json": b"{}"}}}


def test_a_save_that_was_removed_unfinished_is_given_up(tmp_path: Path) -> None:
    store = MemoryStore()
    source = lay(tmp_path, {"config.json": b"{}", "optimizer.bin": b"half"})
    w = worker(tmp_path, store)
    w.tick(0.0)
    shutil.rmtree(source)
    assert "given up" in progress(w.tick(1.0))["checkpoint-4.0"].detail
    assert progress(settle(w, 2.0)) == {}
    assert manifests(store) == []


def test_training_sees_nothing_of_it(tmp_path: Path) -> None:
    source = lay(tmp_path, ONE)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in (source, *source.rglob("*"))}
    settle(worker(tmp_path, MemoryStore()))
    assert {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in (source, *source.rglob("*"))} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_ckptsync", "checkpoint-4"]


def test_a_worker_whose_output_lies_in_the_store_is_refused(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    with pytest.raises(ConfigError, match="inside the store"):
        worker(tmp_path / "run", store)


def test_the_times_of_the_helpers_are_what_the_tests_think(tmp_path: Path) -> None:
    assert lay(tmp_path, ONE, 2.0).joinpath("x").stat().st_mtime_ns == T + 2 * 10**9 + 1
    assert digest(b"A") != digest(other(ONE)["x"])
