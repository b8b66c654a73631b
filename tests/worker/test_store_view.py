"""What the store holds of the saves here, read once and then known without asking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.retention_rules import Rules
from ckptsync.records.io import encode, record_name
from ckptsync.records.manifest import Manifest
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.safe_names import RECORDS
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from ckptsync.worker.file_selection import EVERYTHING
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.store_view import RunRecords, StoreView, read_run
from ckptsync.worker.worker import Worker
from tests.support.filled_stores import put
from tests.support.worker_in_process import (
    ONE,
    Overtaken,
    lay,
    progress,
    seen,
    settle,
    store_save,
    tick,
    verify,
)


def test_a_reading_that_another_overtook_is_only_its_reader_s(tmp_path: Path) -> None:
    store = Overtaken()
    lay(tmp_path, ONE)
    local_save = seen(tmp_path)
    view = StoreView(store, "n0", "run", EVERYTHING, lambda: 0)

    def meanwhile() -> None:
        store_save(local_save, store)
        view.refresh()

    store.meanwhile = meanwhile
    assert not view.refresh().records
    assert view.is_done(local_save)


def test_a_save_that_this_node_said_it_was_sending_is_begun(tmp_path: Path) -> None:
    store = MemoryStore()
    lay(tmp_path, ONE)
    view = StoreView(store, "n0", "run", EVERYTHING, lambda: 0)
    assert not view.is_begun(seen(tmp_path))
    store.write("run/.ckptsync/checkpoint-4/sending/n0", [b"sending\n"])
    view.refresh()
    assert view.is_begun(seen(tmp_path))


class CountingKnown(MemoryStore):
    """Counts what is read; the first bit of one file is broken."""

    count = 0
    broken = ""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.count += 1
        super().read_into(name, start, out)
        if name == self.broken:
            out[0] ^= 1


def filled() -> tuple[CountingKnown, str, str]:
    store = CountingKnown()
    manifest = Manifest("run", "c-1", "c-1~2", "n0", 0, (), (), 0, 0, Demands())
    report = Report("run", "c-1", "c-1~2", 0, "stat", "ok", (), "", 0, ())
    names = []
    for record in (manifest, report):
        data = encode(record)
        names.append(record_name(record, data))
        store.write(names[-1], [data])
    store.write("run/.ckptsync/c-1/files/n0/x", [b"copy"])
    store.write("run/.ckptsync/c-1/stray.json", [b"{}"])
    store.write("other/.ckptsync/c-1/manifest-n0-0-0123456789abcdef.json", [b"{}"])
    return store, names[0], names[1]


def test_records_are_read_once_and_sorted_by_what_they_are() -> None:
    store, manifest, report = filled()
    run_records = read_run(store, "run", RunRecords())
    assert read_run(store, "run", run_records).records == run_records.records
    assert store.count == 2
    assert [k.name for k in run_records.manifests("c-1")] == [manifest]
    assert list(run_records.records_about("c-1~2").reports) == [report]
    assert run_records.records_about("c-1").manifests == {}
    assert run_records.sizes["run/.ckptsync/c-1/files/n0/x"] == 4
    assert run_records.times[manifest] == 1


def test_a_broken_record_concerns_every_location_of_its_checkpoint_and_no_other() -> None:
    store, manifest, _ = filled()
    store.write(manifest, [b"{}"])
    run_records = read_run(store, "run", RunRecords())
    assert isinstance(run_records.broken_location("c-1"), Corrupt)
    assert run_records.broken_location("c-10") is None
    assert run_records.manifests("c-1") == ()


def test_a_damaged_report_keeps_no_checkpoint_back_but_one_of_a_newer_program_does() -> None:
    store, _, report = filled()
    store.write(report, [b"{}"])
    assert read_run(store, "run", RunRecords()).broken_location("c-1") is None
    newer = b'{"format":2}\n'
    store.write(f"run/.ckptsync/c-1/report-2-{digest(newer)[:16]}.json", [newer])
    assert isinstance(read_run(store, "run", RunRecords()).broken_location("c-1"), Unsupported)


def test_a_record_that_somebody_touched_is_read_again() -> None:
    store, manifest, _ = filled()
    run_records = read_run(store, "run", RunRecords())
    store.write(manifest, [bytes(store.size(manifest))])
    assert manifest in read_run(store, "run", run_records).broken


def test_a_record_that_a_new_report_names_is_read_again_though_its_size_and_time_stay() -> None:
    store, manifest, _ = filled()
    run_records = read_run(store, "run", RunRecords())
    count = store.count
    store.broken = manifest  # as a disk breaks bits
    finding = VerifyFinding(
        "digest", manifest.removeprefix("run/"), "checksum does not match the one in its name"
    )
    report = Report("run", "c-1", "c-1~2", 1, "digest", "damaged", (), "", 0, (finding,))
    store.write(record_name(report, encode(report)), [encode(report)])
    run_records = read_run(store, "run", run_records)
    assert manifest in run_records.broken
    store.broken = ""
    run_records = read_run(store, "run", run_records)
    assert manifest in run_records.records
    assert read_run(store, "run", run_records).records == run_records.records
    assert store.count == count + 3


LAST = RetentionRequest(lambda _: Rules(keep_last=1), grace=0.0)
SHARDS = RetentionRequest(lambda _: Rules(shards=1), grace=0.0)


HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
MODEL = len(HEADER).to_bytes(8, "little") + HEADER
W = "model.safetensors"


def sent(out: Path, store: MemoryStore, exclude: tuple[str, ...] = ()) -> Worker:
    """A worker that has sent two checkpoints, and remembers."""
    for n in (1, 2):
        state = json.dumps({"global_step": n}).encode()
        lay(
            out / "x",
            {"trainer_state.json": state, W: MODEL + b"abcd", "notes.txt": b"s"},
            float(n),
        ).rename(out / f"checkpoint-{n}")
    w = again(out, store, exclude)
    settle(w)
    return w


def files(store: MemoryStore, location: str = "checkpoint-1") -> list[str]:
    return [e.name for e in store.names(f"run/{location}/")]


def given_up(
    tmp_path: Path,
    request: RetentionRequest = LAST,
    *,
    ticks: int = 2,
    exclude: tuple[str, ...] = (),
) -> tuple[MemoryStore, Worker]:
    """Two checkpoints that a worker has sent, verified, of which a head has let the first one
    go.
    """
    store = MemoryStore()
    w = sent(tmp_path, store, exclude=exclude)
    for location in ("checkpoint-1", "checkpoint-2"):
        verify(store, location)
    for _ in range(ticks):
        assert apply_retention(store, request).failed == ()
    return store, w


def again(tmp_path: Path, store: MemoryStore, exclude: tuple[str, ...] = ()) -> Worker:
    """The same after a restart, with nothing remembered."""
    return Worker(WorkerOptions("n0", RunDir("run", tmp_path), exclude=exclude), store)


@pytest.mark.parametrize("ticks", [1, 2])
@pytest.mark.parametrize("exclude", [(), ("notes.txt",)])
def test_what_is_marked_or_removed_is_not_sent_again(
    tmp_path: Path, ticks: int, exclude: tuple[str, ...]
) -> None:
    store, w = given_up(tmp_path, ticks=ticks, exclude=exclude)
    before = files(store)
    assert bool(before) == (ticks == 1)
    for worker in (w, again(tmp_path, store, exclude)):
        settle(worker)
        assert progress(tick(worker, 5000.0))["checkpoint-1.0"].phase == "retired"
        assert files(store) == before
    assert [
        n
        for n in (e.name for e in store.names(f"run/{RECORDS}/checkpoint-1/"))
        if "/manifest-" in n
    ] == [] or ticks == 1


def test_shards_that_went_are_not_sent_again_and_the_model_stays(tmp_path: Path) -> None:
    store, w = given_up(tmp_path, SHARDS)
    settle(w)
    settle(again(tmp_path, store))
    assert files(store) == []
    location_records = read_state(store).of("run", "checkpoint-1")
    assert location_records is not None
    assert (location_records.status, location_records.conditions.resume.holds) == (
        "VERIFIED",
        False,
    )


def test_a_report_on_what_is_given_up_asks_for_nothing(tmp_path: Path) -> None:
    store, w = given_up(tmp_path, ticks=1)
    names = tuple(
        e.name for e in store.names(f"run/{RECORDS}/checkpoint-1/") if "/manifest-" in e.name
    )
    store.delete("run/checkpoint-1/model.safetensors")
    damage = (VerifyFinding("missing", f"checkpoint-1/{W}", "gone"),)
    put(
        store,
        Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", names, "", 0, damage),
    )
    result = tick(w, 6000.0)
    assert result.repairs == ()
    assert result.lacks == {}
    assert "run/checkpoint-1/model.safetensors" not in files(store)


def test_what_this_node_lacks_is_told_until_a_report_answers(tmp_path: Path) -> None:
    store = MemoryStore()
    w = sent(tmp_path, store)
    verify(store, "checkpoint-1")
    names = tuple(
        e.name for e in store.names(f"run/{RECORDS}/checkpoint-1/") if "/manifest-" in e.name
    )
    for path in [
        *(tmp_path / "checkpoint-1").iterdir(),
        *(tmp_path / "_ckptsync/pins").glob("checkpoint-1.*/files/*"),
    ]:
        path.unlink()
    store.delete("run/checkpoint-1/model.safetensors")
    damage = (VerifyFinding("missing", f"checkpoint-1/{W}", "gone"),)
    report = put(
        store,
        Report("run", "checkpoint-1", "checkpoint-1", 9, "digest", "damaged", names, "", 0, damage),
    )
    assert tick(w, 6000.0).lacks == {report: (f"checkpoint-1/{W}",)}
    assert tick(w, 6001.0).lacks == {report: (f"checkpoint-1/{W}",)}
    put(store, Report("run", "checkpoint-1", "checkpoint-1", 10, "digest", "ok", names, "", 0, ()))
    assert tick(w, 6002.0).lacks == {}
