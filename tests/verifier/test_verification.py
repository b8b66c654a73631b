"""A location, level by level: what is said, and what is not."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import SMALLEST_BLOCK, digest_stream
from ckptsync.errors import Incomplete, Unsupported
from ckptsync.formats import torch_zip
from ckptsync.records.report import LEVELS, Level, Report
from ckptsync.records.store_paths import consolidated_prefix, file_name
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Entry, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Extent
from ckptsync.verifier.level_digest import Sample, find_archives
from ckptsync.verifier.verification import (
    NO_DIGESTS,
    InStore,
    VerifyOptions,
    verify,
    verify_directory,
    verify_location,
)
from tests.support.files_in_memory import MemoryFiles, tree
from tests.support.filled_stores import entry, flip, put
from tests.support.vector import vector
from tests.support.verified_stores import (
    LOCATION,
    RUN,
    TENSORS,
    WHOLE,
    arrive,
    damage,
    location,
    manifest,
    model_record,
    retire,
    verified,
    whole_store,
)

MODEL = file_name(RUN, LOCATION, "model.safetensors")
CONSOLIDATED = consolidated_prefix(RUN, LOCATION) + "model.safetensors"


@pytest.mark.parametrize("level", LEVELS[:4])
def test_what_is_well_is_well_at_every_level(level: Level) -> None:
    report = verified(whole_store(), level)
    assert (report.level, report.verdict, damage(report)) == (level, "ok", [])
    assert (report.read > 0) == (level != "stat")
    assert len(report.manifests) == 1
    assert report.model_record
    _, *deeper = report.readings
    assert [r.level for r in report.readings] == list(LEVELS[: LEVELS.index(level) + 1])
    assert {(r.files, r.of_files) for r in report.readings[:2]} == {(4, 4)}
    for reading in deeper:
        if reading.level == "digest":
            assert (
                reading.size
                == reading.of_size
                > 2 * sum(len(data) for data in WHOLE.values()) - 1000
            )
        else:
            assert reading.tensors == 6
    if level == "load":
        _, digest, parse, load = report.readings
        assert 0 < parse.size < digest.size
        assert (load.files, load.of_files) == (2, 2)


def test_higher_levels_include_the_lower_ones() -> None:
    store = whole_store()
    store.delete(file_name(RUN, LOCATION, "config.json"))
    flip(store, CONSOLIDATED, 20_000)
    for level in LEVELS[1:3]:
        found = damage(verified(store, level))
        assert ("missing", "checkpoint-4/config.json") in found
        assert ("digest", "consolidated/checkpoint-4/model.safetensors") in found
    assert damage(verified(store, "stat")) == [("missing", "checkpoint-4/config.json")]


def test_real_shards_of_two_nodes_are_verified_with_their_model_and_no_thread_stays() -> None:
    before = {*threading.enumerate()}  # pools of other tests' stores
    store = MemoryStore()
    one, other = (tree(source) for source in vector("hf-fsdp2-2node").sources)
    names = [arrive(store, one.content, "n0"), arrive(store, other.content, "n1")]
    model_record(store, MemoryFiles({**other.content, **one.content}), names)
    report = verified(store, "parse")
    assert (report.verdict, report.level) == ("ok", "parse")
    threads = {thread.name for thread in {*threading.enumerate()} - before}
    assert not [name for name in threads if name.startswith("ckptsync-")]


def test_what_is_arriving_is_checked_as_far_as_it_has_arrived() -> None:
    store = MemoryStore()
    arrive(store, tree(vector("hf-fsdp2-2node").sources[0]).content)
    report = verified(store)
    assert (report.verdict, damage(report)) == ("incomplete", [])
    assert any(
        "pytorch_model_fsdp_0/__" in f.name and "not uploaded" in f.detail for f in report.findings
    )
    flip(store, next(e.name for e in store.names("") if e.name.endswith(".distcp")), 100)
    assert verified(store).verdict == "damaged"


def test_an_ambiguous_location_is_said_and_not_judged() -> None:
    store = whole_store()
    arrive(store, {"notes": b"x"}, "n1", started=10**12, ended=10**12)
    report = verified(store, "parse")
    assert report.verdict == "incomplete"
    assert any("conflict" in f.detail for f in report.findings)


def test_what_a_tombstone_lets_go_is_not_missing() -> None:
    store = whole_store()
    retire(store, "too old")
    store.delete(MODEL)
    report = verified(store)
    assert (report.verdict, damage(report)) == ("ok", [])
    assert any(f.detail.startswith("deleted") for f in report.findings)


class Moving(MemoryStore):
    """Something happens right after the location was listed."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.then, self.listed = then, 0

    def names(self, prefix: str) -> Iterator[Entry]:
        found: Iterable[Entry] = list(super().names(prefix))
        self.listed += 1
        return iter(found)

    def let_go(self) -> None:
        if self.then == "tombstone":
            retire(self, "too old")
            self.delete(MODEL)
        else:
            self.write(MODEL, [WHOLE["model.safetensors"]])


@pytest.mark.parametrize("then", ["tombstone", "repair"])
def test_before_a_file_is_called_missing_the_store_is_asked_again(then: str) -> None:
    store = Moving(then)
    arrive(store, WHOLE)
    if then == "repair":
        store.delete(MODEL)
    seen = location(store)
    store.let_go()
    if then == "tombstone":
        assert verify_location(store, seen, VerifyOptions("stat")).verdict == "ok"
    with pytest.raises(Incomplete, match="changed while it was verified"):
        verify_location(store, seen, VerifyOptions("digest"))


class Late(MemoryStore):
    """A client of NFS that does not see one file yet."""

    late = 60.0
    hidden: frozenset[str] = frozenset({MODEL})

    def names(self, prefix: str) -> Iterator[Entry]:
        return (entry for entry in super().names(prefix) if entry.name not in self.hidden)

    def wait(self, seconds: float) -> None:
        assert seconds == self.late
        self.hidden = frozenset()


def test_what_is_not_seen_yet_is_waited_for_and_not_called_missing() -> None:
    store = Late()
    arrive(store, WHOLE)
    with pytest.raises(Incomplete, match="changed while it was verified"):
        verify_location(store, location(store), VerifyOptions("digest", wait=store.wait))
    assert (
        verify_location(
            store,
            location(store),
            VerifyOptions("digest", wait=lambda _: pytest.fail("nothing is missing")),
        ).verdict
        == "ok"
    )
    store.hidden = Late.hidden
    options = VerifyOptions("digest", wait=store.wait, always_report=True)
    [found] = verify(InStore(store, RUN, LOCATION), options)
    assert (found.report.verdict, found.news) == ("incomplete", None), "it is not judged"


def test_what_is_not_there_after_that_is_missing() -> None:
    store, waited = Late(), list[float]()
    arrive(store, WHOLE)
    store.delete(MODEL)
    assert damage(
        verify_location(store, location(store), VerifyOptions("stat", wait=waited.append))
    ) == [("missing", "checkpoint-4/model.safetensors")]
    assert waited == [60.0]


def test_a_damaged_manifest_is_damage_of_its_location() -> None:
    store = whole_store()
    arrive(store, {"rng_state_1.pth": b"x"}, "n1")
    name = next(e.name for e in store.names("") if "/manifest-n1-" in e.name)
    flip(store, name, 40)
    report = verified(store)
    assert damage(report) == [("digest", name.removeprefix("run/"))]


def test_a_sample_says_what_it_covers_and_claims_no_more_than_stat() -> None:
    store = whole_store()
    found = read_state(store)
    report = verify_location(store, found.locations[0], VerifyOptions("digest", sample=Sample(0.1)))
    (note,) = report.findings
    reading = report.readings[1]
    assert (report.verdict, report.level) == ("ok", "stat")
    assert 0 < reading.size < reading.of_size
    assert f"{reading.size} of {reading.of_size} bytes" in note.detail
    assert report.read == reading.size


def test_damage_in_a_sample_is_damage_of_level_digest() -> None:
    store = whole_store()
    flip(store, CONSOLIDATED, 20_000)
    report = verify_location(
        store, read_state(store).locations[0], VerifyOptions("digest", sample=Sample(1.0))
    )
    assert (report.verdict, report.level, damage(report)) == (
        "damaged",
        "digest",
        [("digest", "consolidated/checkpoint-4/model.safetensors")],
    )


@pytest.mark.parametrize(
    "name",
    [f"{RUN}/{LOCATION}/core.1234", consolidated_prefix(RUN, LOCATION) + "extra.safetensors"],
)
def test_what_no_record_names_is_told_and_no_damage(name: str) -> None:
    store = whole_store()
    store.write(name, [b"12345"])
    report = verified(store)
    assert [(f.kind, f.name, f.detail) for f in report.findings] == [
        ("note", name.removeprefix(f"{RUN}/"), "5 bytes that no record names")
    ]
    assert (report.verdict, report.level) == ("ok", "digest")


def test_bytes_are_told_while_they_are_read() -> None:
    store = whole_store()
    told: list[int] = []
    report = verify_location(
        store, read_state(store).locations[0], VerifyOptions("digest", progress=told.append)
    )
    assert sum(told) == report.read


def test_a_shard_that_was_damaged_before_it_arrived_is_found_when_it_is_loaded() -> None:
    files = dict(tree(*vector("hf-fsdp2-2node").sources).content)
    path, there = "optimizer_0/__1_0.distcp", MemoryFiles(files)
    archives = [
        torch_zip.open_archive(there, Extent(path, start, size))
        for start, size, _ in find_archives(there)[path] or ()
    ]
    where = torch_zip.extent(there, next(a for a in archives if "data/0" in a.records), "data/0")
    damaged = bytearray(files[path])
    damaged[where.start] ^= 4
    store = MemoryStore()
    arrive(store, {**files, path: bytes(damaged)})
    assert verified(store, "parse").verdict == "ok"
    report = verified(store, "load")
    assert [(f.kind, f.name) for f in report.findings if f.kind == "load"] == [
        ("load", f"{LOCATION}/{path}")
    ]
    assert report.verdict == "damaged"


def test_without_shards_and_model_record_nothing_can_be_proven_and_that_is_damage() -> None:
    store = whole_store()
    (model_record_name,) = location(store).records.model_records
    retire(store, "old", "shards", "done")
    for path in WHOLE:
        store.delete(file_name(RUN, LOCATION, path))
    assert verified(store).verdict == "ok"
    store.delete(model_record_name)
    report = verified(store)
    assert (report.verdict, damage(report)) == (
        "damaged",
        [("missing", f"consolidated/{LOCATION}")],
    )


def test_a_model_record_that_is_gone_before_any_shard_has_follows_from_them() -> None:
    store = whole_store()
    retire(store, "old", "shards", "begun")
    store.delete(*location(store).records.model_records)
    assert verified(store).verdict == "ok"


# --- level digest

STORE = whole_store()
SPANS = {
    t.name: (t.start, t.start + t.size)
    for model_record in location(STORE).records.model_records.values()
    for t in model_record.tensors
}
SIZE = STORE.size(CONSOLIDATED)


@given(st.integers(0, SIZE - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_the_model_names_its_tensor_and_nothing_else(
    at: int, bit: int
) -> None:
    flip(STORE, CONSOLIDATED, at, bit)
    (found,) = verified(STORE).findings
    flip(STORE, CONSOLIDATED, at, bit)
    owner = [name for name, (start, end) in SPANS.items() if start <= at < end]
    assert (found.kind, found.name) == ("digest", "consolidated/checkpoint-4/model.safetensors")
    assert list(found.tensors) == owner
    assert found.ranges == (
        (SPANS[owner[0]],) if owner else ((0, min(start for start, _ in SPANS.values())),)
    )


def test_a_zeroed_page_in_a_shard_names_the_tensors_of_its_block() -> None:
    store = whole_store()
    name = file_name(RUN, LOCATION, "model.safetensors")
    data = bytearray(read_all(store, name))
    page = 39_000 // SMALLEST_BLOCK * SMALLEST_BLOCK
    data[page : page + 4096] = bytes(4096)
    store.write(name, [data])
    (found,) = verified(store).findings
    assert found.ranges == ((page, page + SMALLEST_BLOCK),)
    assert found.tensors == ("a", "b")


def test_damage_in_two_tensors_is_told_of_both() -> None:
    store = whole_store()
    for name in ("a", "c"):
        flip(store, CONSOLIDATED, SPANS[name][0])
    (found,) = verified(store).findings
    assert found.tensors == ("a", "c")
    assert len(found.ranges) == 2


def test_a_page_that_takes_the_header_and_a_tensor_is_told_of_both() -> None:
    store = whole_store()
    data = bytearray(read_all(store, CONSOLIDATED))
    data[:SMALLEST_BLOCK] = bytes(SMALLEST_BLOCK)
    store.write(CONSOLIDATED, [data])
    (found,) = verified(store).findings
    assert found.ranges[0][0] == 0
    assert "a" in found.tensors


def test_all_bytes_are_read_once_when_nothing_is_wrong() -> None:
    everything = sum(e.size for e in STORE.names("") if "/.ckptsync/" not in e.name)
    assert (
        verified(STORE).read == everything > 2 * sum(len(data) for _, _, data in TENSORS.values())
    )


class Lying(MemoryStore):
    """Memory that flips a bit once."""

    lies = 1

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        super().read_into(name, start, out)
        if name.endswith("config.json") and self.lies:
            self.lies -= 1
            out[0] ^= 1


def test_a_file_that_reads_differently_twice_is_not_called_well() -> None:
    store = Lying()
    arrive(store, WHOLE)
    (found,) = verified(store).findings
    assert (found.kind, found.ranges) == ("digest", ())
    assert "two reads" in found.detail


def test_damage_in_a_file_of_large_blocks_is_told_by_block() -> None:
    store, data = MemoryStore(), bytes(range(256)) * 256
    store.write(file_name(RUN, LOCATION, "model.bin"), [data])
    found = digest_stream([data], len(data), 16 << 10)
    file = replace(entry("model.bin", data), block_size=found.block_size, blocks=found.blocks)
    put(store, replace(manifest({"model.bin": data}), files=(file,)))
    flip(store, file_name(RUN, LOCATION, "model.bin"), 20_000, 3)
    assert [f.ranges for f in verified(store).findings if f.kind == "digest"] == [
        ((16 << 10, 32 << 10),)
    ]


# --- plain directories

SHARDS = tree(*vector("hf-fsdp2-2node").sources).content


def written(root: Path, files: dict[str, bytes]) -> DirectoryFiles:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return DirectoryFiles(str(root))


def verified_directory(root: Path, files: dict[str, bytes], level: Level = "parse") -> Report:
    return verify_directory(written(root, files), "checkpoint-4", VerifyOptions(level))


@pytest.mark.parametrize("files", [WHOLE, SHARDS], ids=["whole", "shards"])
def test_what_parses_is_well_and_no_digest_is_claimed(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    report = verified_directory(tmp_path, files)
    assert (report.verdict, report.level) == ("ok", "parse")
    assert [f.detail for f in report.findings if "CRC32s" not in f.detail] == [NO_DIGESTS]
    assert 0 < report.read < 3 * sum(map(len, files.values()))


def test_level_digest_proves_no_more_than_stat_here_and_says_so(tmp_path: Path) -> None:
    report = verified_directory(tmp_path, WHOLE, "digest")
    assert (report.level, report.verdict) == ("stat", "ok")
    assert [f.detail for f in report.findings] == [NO_DIGESTS]


def test_what_its_metadata_demands_and_is_not_there_is_missing(tmp_path: Path) -> None:
    gone = next(p for p in SHARDS if p.startswith("pytorch_model") and p.endswith("__1_0.distcp"))
    report = verified_directory(
        tmp_path, {p: data for p, data in SHARDS.items() if p != gone}, "stat"
    )
    assert (report.verdict, damage(report)) == ("incomplete", [("missing", gone)])


def test_a_directory_without_its_metadata_is_not_called_well(tmp_path: Path) -> None:
    report = verified_directory(
        tmp_path, {p: data for p, data in SHARDS.items() if not p.endswith(".metadata")}
    )
    assert report.verdict == "incomplete"


def test_a_shard_that_was_cut_is_damage_at_every_level(tmp_path: Path) -> None:
    cut = next(p for p in SHARDS if p.startswith("pytorch_model") and p.endswith(".distcp"))
    report = verified_directory(tmp_path, {**SHARDS, cut: SHARDS[cut][:-1]}, "stat")
    assert (report.verdict, damage(report)) == ("damaged", [("size", cut)])


def test_what_does_not_parse_is_damage(tmp_path: Path) -> None:
    report = verified_directory(tmp_path, {**WHOLE, "config.json": b"{"})
    assert damage(report) == [("parse", "config.json")]


def test_what_no_layout_knows_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no known checkpoint"):
        verified_directory(tmp_path, {"notes.txt": b"x"})


def test_a_directory_that_changes_meanwhile_is_not_judged(tmp_path: Path) -> None:
    files = written(tmp_path, WHOLE)
    (tmp_path / "config.json").write_bytes(b"{}")
    with pytest.raises(Incomplete, match="changed"):
        verify_directory(files, "", VerifyOptions("parse"))


def test_what_was_not_looked_at_is_noted(tmp_path: Path) -> None:
    written(tmp_path, WHOLE)
    (tmp_path / "extra.safetensors").symlink_to("model.safetensors")
    report = verify_directory(DirectoryFiles(str(tmp_path)), "here", VerifyOptions("digest"))
    assert report.verdict == "ok"
    assert "extra.safetensors: ignored: links are not followed" in [
        f.detail for f in report.findings
    ]
