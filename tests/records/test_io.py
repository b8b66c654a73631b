"""Records as bytes: canonical, named by their digest, and refused when they would lead
elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest

from ckptsync.digest import digest, digest_stream
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import (
    LIMITS,
    Record,
    create_record,
    decode,
    encode,
    is_made_anew,
    kind_of,
    record_name,
)
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord, ModelTensor
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.save_decisions import Join, Keep, Tombstone
from ckptsync.records.store_paths import FORMAT, RecordKind, RecordName, parse_record_name
from ckptsync.records.weights_record import WeightsRecord
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands

KINDS: tuple[RecordKind, ...] = get_args(RecordKind)
FOUND = digest_stream([b"hello"], 5)
FILE = FileEntry("dcp/__0_0.distcp", 5, FOUND.digest, FOUND.block_size, FOUND.blocks, 7)
OTHER = "run/.ckptsync/checkpoint-5/manifest-a-0-0123456789abcdef.json"
WHERE = ("run", "checkpoint-5", "checkpoint-5")
DEMANDS = Demands({"x": None}, {"y": 1}, 2)
MANIFEST = Manifest(*WHERE[:2], "checkpoint-5~1", "host-1", 3, (FILE,), (0,), 1, 2, DEMANDS)
SEALED = (ModelFile("m", 9, FOUND.digest),)
SEAL = ModelRecord(*WHERE, 0, (OTHER,), {"dtype": "auto"}, SEALED, ())
FINDING = VerifyFinding("size", "é", "…", ((0, 1),))
REPORT = Report(*WHERE, 0, "stat", "damaged", (OTHER,), "", 5, (FINDING,))
TENSOR = ModelTensor("w", "F32", (1,), "m", 4, 4, FOUND.digest)
TOMBSTONE = Tombstone(*WHERE, 0, (OTHER,), "old")
SHARDS = replace(TOMBSTONE, scope="shards", stage="begun", ended={"a": 3})
KEEP = Keep(*WHERE, 0, keeps=True, reason="for the paper")
JOIN = Join(*WHERE, 0, (OTHER,))
WEIGHTS = WeightsRecord(*WHERE, 0, "0" * 64, ((0, 1, 2, -1.5, 0.0, 2.25), None))
EVENT = EventRecord(
    *(*WHERE, 0, "eval", "0" * 16, "verified", "m"),
    outcome="done",
    error="x" * 500,
    metrics=dict.fromkeys(map(str, range(50)), 1.0),
)
OURS = (
    ".ckptsync",
    "consolidated",
    "Consolidated",
    ".CKPTSYNC",
    "con\u200csolidated",
    "con\u017folidated",
    "consolidated.",
    "CONSOL~1",
    "ckptsy~1",
)
NO_RUNS = (".ckptsync", "run/consolidated", "a/b", "run/checkpoint-5", "consolidated", "_x", ".x")


TIMED = replace(
    MANIFEST,
    save="0123456789abcdef",
    trainer="transformers 5.2.0",
    times={"finished": 3, "sending": 4},
)


@pytest.mark.parametrize(
    "record",
    [
        MANIFEST,
        TIMED,
        SEAL,
        replace(SEAL, tensors=(TENSOR,)),
        REPORT,
        TOMBSTONE,
        SHARDS,
        KEEP,
        WEIGHTS,
        EVENT,
    ],
)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data = encode(record)
    assert decode(record_name(record, data), data) == record
    assert encode(record) == data


def test_the_values_of_as_many_tensors_as_a_model_record_holds_are_read() -> None:
    longest = (10**15, 10**15, 10**15, -1.23456e-308, 1.23456e-308, 1.23456e-308)
    record = replace(WEIGHTS, values=(longest,) * 1_200)
    data = encode(record)
    assert decode(record_name(record, data), data) == record
    assert len(data) * 100 <= LIMITS["weights"], "120,000 tensors fit"
    usual = replace(WEIGHTS, values=((0, 0, 0, -0.123456, 0.123456, 12.3456),) * 1_000)
    assert len(encode(usual)) < 45_000


def test_a_record_is_named_by_its_digest() -> None:
    data = encode(MANIFEST)
    assert (
        record_name(MANIFEST, data)
        == f"run/.ckptsync/checkpoint-5~1/manifest-host-1-3-{digest(data)[:16]}.json"
    )


def test_any_other_byte_is_noticed() -> None:
    data = encode(TOMBSTONE)
    name = record_name(TOMBSTONE, data)
    for at in range(len(data)):
        with pytest.raises(Corrupt, match="checksum does not match"):
            decode(name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Corrupt, match="checksum does not match"):
            decode(name, data[:at])


def forged(record: Record, **changes: Any) -> tuple[str, bytes]:
    """As whoever may write to the store could write it: with a fitting name."""
    fields = {**json.loads(encode(record)), **changes}
    data = json.dumps(fields).encode()
    name = parse_record_name(record_name(record, b""))
    assert name
    return str(replace(name, digest=digest(data)[:16])), data


def test_a_report_of_level_model_which_nobody_writes_any_more_counts_as_load() -> None:
    reading = {"level": "model", "files": 1, "size": 2, "of_files": 1, "of_size": 2}
    report = decode(*forged(REPORT, level="model", readings=[reading]))
    assert isinstance(report, Report)
    assert (report.level, report.readings[0].size) == ("load", 2)


def test_a_newer_format_is_refused_and_not_guessed_at() -> None:
    with pytest.raises(Unsupported, match=f"record format {FORMAT + 1}"):
        decode(*forged(TOMBSTONE, format=FORMAT + 1, reason={"new": "shape"}))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(f"run/.ckptsync/c/tombstone-0-{digest(data)[:16]}.json", data)


def test_a_number_with_zeros_before_it_names_no_record() -> None:
    data = encode(TOMBSTONE)
    for number in ("00", "\u0660", "0" * 5000, "1" * 19):
        assert parse_record_name(record_name(TOMBSTONE, data).replace("-0-", f"-{number}-")) is None


AT_ONCE = """
import sys, threading
from ckptsync.records.io import decode

name, data, barrier = sys.argv[1], sys.argv[2].encode(), threading.Barrier(8)
sys.setswitchinterval(1e-6)
work = lambda: (barrier.wait(), decode(name, data))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


def test_threads_may_read_their_first_records_at_once() -> None:
    data = encode(MANIFEST)
    for _ in range(3):  # without care every second try dies
        done = subprocess.run(
            [sys.executable, "-c", AT_ONCE, record_name(MANIFEST, data), data.decode()], check=False
        )
        assert done.returncode == 0


def test_only_a_damaged_model_record_or_report_or_word_to_keep_hides_no_location() -> None:
    digest16 = "0" * 16
    told = {
        kind: [
            is_made_anew(
                RecordName(
                    "run", "checkpoint-5", kind, "n" if kind == "manifest" else "", 0, digest16
                ),
                error,
            )
            for error in (Corrupt("x"), Unsupported("x"))
        ]
        for kind in KINDS
    }
    anew = ("model", "weights", "report", "keep", "join", "event")
    assert told == {kind: [kind in anew, False] for kind in KINDS}
    assert not is_made_anew(None, Corrupt("x"))


def test_what_would_be_too_large_for_any_reader_is_refused_where_it_is_written() -> None:
    with pytest.raises(
        Unsupported,
        match=r"^run/checkpoint-5: its keep would have \d+ bytes, at most 4194304 can be read",
    ) as caught:
        encode(replace(KEEP, reason="x" * LIMITS["keep"]))
    assert "110,000 files" in caught.value.hint
    many = tuple(
        replace(FILE, path=f"experts/layer_{n:06}_expert_model_states.pt") for n in range(1_200)
    )
    large = replace(MANIFEST, files=many)
    data = encode(large)
    assert decode(record_name(large, data), data) == large
    assert len(data) * 100 <= LIMITS["manifest"], "120,000 files fit"


NUMBERS = [
    (MANIFEST, {"n": True}),
    (MANIFEST, {"started": -(10**400)}),
    (MANIFEST, {"clock_offset": 10**400}),
    (MANIFEST, {"demands": {"model": {"x": 2**63}, "resume": {}, "world": 1}}),
    (MANIFEST, {"ranks": [False]}),
    (SEAL, {"tensors": [asdict(TENSOR) | {"shape": [10**4000]}]}),
    (REPORT, {"when": 1e300}),
    (REPORT, {"read": -1}),
    (TOMBSTONE, {"ended": {"a": 10**400}}),
    (KEEP, {"format": True}),
]


@pytest.mark.parametrize(("record", "changes"), NUMBERS)
def test_a_number_that_nothing_can_have_is_corrupt(record: Record, changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="not a "):
        decode(*forged(record, **changes))


def file(**changes: Any) -> list[dict[str, Any]]:
    return [{**json.loads(encode(MANIFEST))["files"][0], **changes}]


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "other"},
        {"location": "checkpoint-6"},
        {"checkpoint": "checkpoint-6"},
        {"node": "other"},
        {"n": 4},
        {"format": "1"},
        {"format": None},
        {"n": "3"},
        {"started": 3},
        {"files": file(path="../../etc/passwd")},
        {"files": file(path="/etc/passwd")},
        {"files": file(path="a\\b")},
        {"files": file(size=-1)},
        {"files": file(size=1 << 40)},
        {"files": file(block_size=0)},
        {"files": file(blocks=[])},
        {"files": file(digest="no")},
        {"files": file() * 2},
        {"files": file(stored_as="run/checkpoint-5/other")},
        {"files": file(stored_as="run/.ckptsync/checkpoint-5/files/other/" + file()[0]["path"])},
        {"files": file(stored_as="run/.ckptsync/checkpoint-5/files/a/../../../x")},
        {"demands": {"model": {"../x": 1}, "resume": {}, "world": None}},
        {"demands": {"model": {}, "resume": {"": 1}, "world": None}},
        {"ranks": [-1]},
        {"ranks": [1 << 20]},
        {"demands": {"model": {}, "resume": {}, "world": 2 << 20}},
        {"demands": {"model": {}, "resume": {}, "world": -1}},
        {"trainer": "x" * 201},
        {"trainer": "a\x1b[2J"},
        {"times": {"finished": "now"}},
        {"supersedes": ["run/checkpoint-5/model.safetensors"]},
    ],
)
def test_a_forged_manifest_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode(*forged(MANIFEST, **changes))


@pytest.mark.parametrize(
    "record",
    [
        replace(SEAL, manifests=("../x",)),
        replace(SEAL, files=(replace(SEALED[0], path="../m"),)),
        replace(SEAL, files=SEALED * 2),
        replace(SEAL, tensors=(replace(TENSOR, file="other"),)),
        replace(SEAL, tensors=(replace(TENSOR, start=6),)),
        replace(SEAL, tensors=(replace(TENSOR, size=-1),)),
        replace(SEAL, location="checkpoint-55"),
        replace(TOMBSTONE, ended={"..": 1}),
        replace(JOIN, manifests=("../x",)),
        replace(EVENT, error="x" * 501),
        replace(EVENT, of="x" * 201),
        replace(EVENT, metrics=dict.fromkeys(map(str, range(51)), 1.0)),
        replace(EVENT, metrics={"x" * 201: 1.0}),
    ],
)
def test_a_forged_record_is_corrupt(record: Record) -> None:
    data = encode(record)
    with pytest.raises(Corrupt):
        decode(record_name(record, data), data)


@pytest.mark.parametrize("node", ["..", "a" * 101])
def test_a_node_that_is_no_name_is_corrupt(node: str) -> None:
    record = replace(MANIFEST, node=node)
    with pytest.raises(Corrupt, match="not a node id"):
        decode(record_name(record, encode(record)), encode(record))


@pytest.mark.parametrize(
    "record", [MANIFEST, SEAL, REPORT, TOMBSTONE, KEEP, JOIN, WEIGHTS], ids=kind_of
)
@pytest.mark.parametrize(
    "names",
    [
        *({"checkpoint": name, "location": name} for name in OURS),
        *({"run": name} for name in NO_RUNS),
    ],
    ids=lambda names: "-".join(names.values()).encode("ascii", "replace").decode(),
)
def test_no_record_speaks_of_what_is_a_stores_own(record: Record, names: dict[str, str]) -> None:
    hostile = replace(record, **names)  # type: ignore[arg-type]
    data = encode(hostile)
    with pytest.raises(
        Corrupt, match=r"the store itself uses|not one directory's name|plain relative"
    ):
        decode(record_name(hostile, data), data)
    store = MemoryStore()
    with pytest.raises(Corrupt):
        create_record(store, hostile)
    assert [*store.names("")] == []


def test_a_record_that_was_damaged_is_written_again_by_whoever_writes_it() -> None:
    store = MemoryStore()
    name, data = create_record(store, KEEP)
    for content in (b"", data[:-1]):
        store.write(name, [content])
        assert create_record(store, KEEP) == (name, data)
        assert read_all(store, name) == data


def test_no_file_lies_among_records() -> None:
    path = ".ckptsync/checkpoint-4/tombstone-0-0123456789abcdef.json"
    for hostile in (
        replace(MANIFEST, files=(replace(FILE, path=path),)),
        replace(SEAL, files=(replace(SEALED[0], path=f"a/{path}"),)),
    ):
        data = encode(hostile)
        with pytest.raises(Corrupt, match="records"):
            decode(record_name(hostile, data), data)
