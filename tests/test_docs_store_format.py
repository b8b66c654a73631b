from __future__ import annotations

import dataclasses

import pytest

from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.model_record import ModelFile, ModelRecord, ModelTensor
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.tombstone_keep_join import Join, Keep, Tombstone
from tests.listing import DOCUMENT, document


def test_the_listing_is_what_the_code_makes() -> None:
    text = DOCUMENT.read_text()
    assert document(text) == text, "python -m tests.listing writes it anew"


@pytest.mark.parametrize(
    "record",
    [
        Manifest,
        FileEntry,
        ModelRecord,
        ModelFile,
        ModelTensor,
        Report,
        VerifyFinding,
        Tombstone,
        Keep,
        Join,
    ],
)
def test_every_field_of_a_record_is_described(record: type) -> None:
    fields = {f.name for f in dataclasses.fields(record)}
    assert fields <= {word for word in DOCUMENT.read_text().split("`") if word.isidentifier()}
