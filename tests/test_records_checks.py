"""Whoever may write to the store may write a record: what in it would lead somewhere else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ckptsync.errors import Corrupt
from ckptsync.records.coding import decode, encode, record_name
from ckptsync.records.manifest import Manifest
from ckptsync.records.model_record import ModelRecord
from tests.test_records_coding import MANIFEST, SEAL, SEALED, TENSOR, forged


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
        replace(SEAL, location="checkpoint-55"),
    ],
)
def test_a_forged_model_record_is_corrupt(record: ModelRecord) -> None:
    data = encode(record)
    with pytest.raises(Corrupt):
        decode(record_name(record, data), data, ModelRecord)


@pytest.mark.parametrize("node", ["..", "a" * 101])
def test_a_node_that_is_no_name_is_corrupt(node: str) -> None:
    record = replace(MANIFEST, node=node)
    with pytest.raises(Corrupt, match="not a node id"):
        decode(record_name(record, encode(record)), encode(record), Manifest)


def test_a_model_record_with_its_tensors_is_well() -> None:
    record = replace(SEAL, tensors=(TENSOR,))
    data = encode(record)
    assert decode(record_name(record, data), data, ModelRecord) == record
