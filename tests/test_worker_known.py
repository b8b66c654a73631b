"""What a worker reads of a run's records, and how often."""

from __future__ import annotations

import threading

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.model import Demands
from ckptsync.records.coding import encode, record_name
from ckptsync.records.manifest import Manifest
from ckptsync.records.report import Finding, Report
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.store_view import RunRecords, read_records


class Counting(MemoryStore):
    """Counts what is read; the first bit of one file is broken."""

    count = 0
    broken = ""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.count += 1
        super().read_into(name, start, out)
        if name == self.broken:
            out[0] ^= 1


def filled() -> tuple[Counting, str, str]:
    store = Counting()
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
    known = read_records(store, "run", RunRecords())
    assert read_records(store, "run", known).records == known.records
    assert store.count == 2
    assert [k.name for k in known.manifests("c-1")] == [manifest]
    assert list(known.location("c-1~2").reports) == [report]
    assert known.location("c-1").manifests == {}
    assert known.sizes["run/.ckptsync/c-1/files/n0/x"] == 4
    assert known.times[manifest] == 1


def test_what_was_deleted_is_no_longer_known() -> None:
    store, manifest, _ = filled()
    known = read_records(store, "run", RunRecords())
    store.delete(manifest)
    assert read_records(store, "run", known).manifests("c-1") == ()


def test_a_broken_record_concerns_every_location_of_its_checkpoint_and_no_other() -> None:
    store, manifest, _ = filled()
    store.write(manifest, [b"{}"])
    known = read_records(store, "run", RunRecords())
    assert isinstance(known.broken_location("c-1"), Corrupt)
    assert known.broken_location("c-10") is None
    assert known.manifests("c-1") == ()


def test_a_damaged_report_keeps_no_checkpoint_back_but_one_of_a_newer_program_does() -> None:
    store, _, report = filled()
    store.write(report, [b"{}"])
    assert read_records(store, "run", RunRecords()).broken_location("c-1") is None
    newer = b'{"format":2}\n'
    store.write(f"run/.ckptsync/c-1/report-2-{digest(newer)[:16]}.json", [newer])
    assert isinstance(read_records(store, "run", RunRecords()).broken_location("c-1"), Unsupported)


def test_a_record_that_somebody_touched_is_read_again() -> None:
    store, manifest, _ = filled()
    known = read_records(store, "run", RunRecords())
    store.write(manifest, [b"{}"])
    assert manifest in read_records(store, "run", known).broken


def test_a_record_that_a_new_report_names_is_read_again_though_its_size_and_time_stay() -> None:
    store, manifest, _ = filled()
    known = read_records(store, "run", RunRecords())
    count = store.count
    store.broken = manifest  # as a disk breaks bits
    finding = Finding("digest", manifest.removeprefix("run/"), "bytes do not have the digest in the name")
    report = Report("run", "c-1", "c-1~2", 1, "digest", "damaged", (), "", 0, (finding,))
    store.write(record_name(report, encode(report)), [encode(report)])
    known = read_records(store, "run", known)
    assert manifest in known.broken
    store.broken = ""
    known = read_records(store, "run", known)
    assert manifest in known.records
    assert read_records(store, "run", known).records == known.records
    assert store.count == count + 3


def test_records_are_fetched_many_at_once() -> None:
    meeting = threading.Barrier(8, timeout=20)

    class Slow(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            meeting.wait()
            super().read_into(name, start, out)

    store = Slow()
    for n in range(16):
        store.write(f"run/.ckptsync/c-1/report-{n}-0123456789abcdef.json", [b"{}"])
    assert len(read_records(store, "run", RunRecords()).broken) == 16
