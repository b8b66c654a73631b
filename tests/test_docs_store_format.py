from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from ckptsync.records.event_record import EventRecord
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord, ModelTensor
from ckptsync.records.report import LEVELS, FindingKind, Level, Report, VerifyFinding
from ckptsync.records.save_decisions import Join, Keep, Tombstone
from ckptsync.records.store_paths import RecordKind
from ckptsync.records.weights_record import WeightsFinding, WeightsRecord
from tests.support.store_listing import DOCUMENT, document


def test_the_listing_is_what_the_code_makes() -> None:
    text = DOCUMENT.read_text()
    assert document(text) == text, "python -m tests.support.store_listing writes it anew"


@pytest.mark.parametrize(
    "record",
    [
        Manifest,
        FileEntry,
        ModelRecord,
        ModelFile,
        ModelTensor,
        WeightsRecord,
        WeightsFinding,
        Report,
        VerifyFinding,
        Tombstone,
        Keep,
        Join,
        EventRecord,
    ],
)
def test_every_field_of_a_record_is_described(record: type) -> None:
    fields = {f.name for f in dataclasses.fields(record)}
    assert fields <= {word for word in DOCUMENT.read_text().split("`") if word.isidentifier()}


def test_every_kind_of_record_and_finding_and_every_level_is_described() -> None:
    told = DOCUMENT.read_text()
    kinds = {*get_args(RecordKind), *get_args(Level), *get_args(FindingKind)} - {"manifest"}
    assert {word for word in kinds if f"`{word}`" not in told} == set()
    told = Path(DOCUMENT).with_name("verify.md").read_text()
    assert {level for level in LEVELS if f"| `{level}` |" not in told} == set()
