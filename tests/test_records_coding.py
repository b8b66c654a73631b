from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import digest, digest_stream
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.model import Demands
from ckptsync.records.coding import Record, decode, encode, record_name
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.names import RecordName, parse_record_name
from ckptsync.records.report import Finding, Report
from ckptsync.records.seal import Seal, SealedFile, SealedTensor
from ckptsync.records.tombstone import Tombstone

FOUND = digest_stream([b"hello"], 5)
FILE = FileEntry("dcp/__0_0.distcp", 5, FOUND.digest, FOUND.block_size, FOUND.blocks, 7)
OTHER = "run/.ckptsync/checkpoint-5/manifest-a-0-0123456789abcdef.json"
MANIFEST = Manifest("run", "checkpoint-5", "checkpoint-5~1", "host-1", 3, (FILE,), (0,), 1, 2, Demands({"x": None}, {"y": 1}, 2))
SEALED = (SealedFile("m", 9, FOUND.digest),)
SEAL = Seal("run", "checkpoint-5", "checkpoint-5", 0, (OTHER,), {"dtype": "auto"}, SEALED, ())
REPORT = Report(
    "run", "checkpoint-5", "checkpoint-5", 0, "stat", "damaged", (OTHER,), "", 5, (Finding("size", "é", "…", ((0, 1),)),)
)
TENSOR = SealedTensor("w", "F32", (1,), "m", 4, 4, FOUND.digest)
TOMBSTONE = Tombstone("run", "checkpoint-5", "checkpoint-5", 0, (OTHER,), "old")


@pytest.mark.parametrize("record", [MANIFEST, SEAL, REPORT, TOMBSTONE])
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data, kind = encode(record), type(record)
    assert decode(record_name(record, data), data, kind) == record  # type: ignore[type-var]
    assert encode(record) == data


def test_a_record_is_named_by_its_digest() -> None:
    data = encode(MANIFEST)
    assert record_name(MANIFEST, data) == f"run/.ckptsync/checkpoint-5~1/manifest-host-1-3-{digest(data)[:16]}.json"


def test_any_other_byte_is_noticed() -> None:
    data = encode(TOMBSTONE)
    name = record_name(TOMBSTONE, data)
    for at in range(len(data)):
        with pytest.raises(Corrupt, match="digest in the name"):
            decode(name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], Tombstone)
        with pytest.raises(Corrupt, match="digest in the name"):
            decode(name, data[:at], Tombstone)


def forged(record: Record, **changes: Any) -> tuple[str, bytes]:
    """As whoever may write to the store could write it: with a fitting name."""
    fields = {**json.loads(encode(record)), **changes}
    data = json.dumps(fields).encode()
    name = parse_record_name(record_name(record, b""))
    assert name
    return str(replace(name, digest=digest(data)[:16])), data


def test_a_newer_format_is_refused_and_not_guessed_at() -> None:
    with pytest.raises(Unsupported, match="record format 2"):
        decode(*forged(TOMBSTONE, format=2, reason={"new": "shape"}), Tombstone)


def file(**changes: Any) -> list[dict[str, Any]]:
    return [{**json.loads(encode(MANIFEST))["files"][0], **changes}]


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "other"},
        {"place": "checkpoint-6"},
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
        {"demands": {"model": {"../x": 1}, "resume": {}, "world": None}},
        {"demands": {"model": {}, "resume": {"": 1}, "world": None}},
        {"supersedes": ["run/checkpoint-5/model.safetensors"]},
    ],
)
def test_a_forged_manifest_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode(*forged(MANIFEST, **changes), Manifest)


@pytest.mark.parametrize(
    "record",
    [
        replace(SEAL, manifests=("../x",)),
        replace(SEAL, files=(replace(SEALED[0], path="../m"),)),
        replace(SEAL, files=SEALED * 2),
        replace(SEAL, tensors=(replace(TENSOR, file="other"),)),
        replace(SEAL, tensors=(replace(TENSOR, start=6),)),
        replace(SEAL, tensors=(replace(TENSOR, size=-1),)),
        replace(SEAL, place="checkpoint-55"),
    ],
)
def test_a_forged_seal_is_corrupt(record: Seal) -> None:
    data = encode(record)
    with pytest.raises(Corrupt):
        decode(record_name(record, data), data, Seal)


@pytest.mark.parametrize("node", ["..", "a" * 101])
def test_a_node_that_is_no_name_is_corrupt(node: str) -> None:
    record = replace(MANIFEST, node=node)
    with pytest.raises(Corrupt, match="not a node id"):
        decode(record_name(record, encode(record)), encode(record), Manifest)


def test_a_seal_with_its_tensors_is_well() -> None:
    record = replace(SEAL, tensors=(TENSOR,))
    data = encode(record)
    assert decode(record_name(record, data), data, Seal) == record


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(f"run/.ckptsync/c/tombstone-0-{digest(data)[:16]}.json", data, Tombstone)


NODES = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)


@given(NODES, st.integers(0, 10**6), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_names_come_back_as_they_were(node: str, n: int, end: str) -> None:
    name = RecordName("run", "checkpoint-5~1", "manifest", node, n, end)
    assert parse_record_name(str(name)) == name


@given(st.text(max_size=60))
def test_other_names_are_no_records(text: str) -> None:
    for name in (text, f"run/.ckptsync/checkpoint-5/{text}"):
        parsed = parse_record_name(name)
        assert parsed is None or str(parsed).count("/") == 3


def test_a_number_with_zeros_before_it_names_no_record() -> None:
    data = encode(TOMBSTONE)
    with pytest.raises(Corrupt, match="speaks of"):
        decode(record_name(TOMBSTONE, data).replace("-0-", "-00-"), data, Tombstone)
