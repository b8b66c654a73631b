"""What is read is exactly one of the dataclasses, or nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ckptsync.spool.marks import Commit
from ckptsync.spool.reading import read
from tests.test_spool_marks import COMMIT

BROKEN = {
    "nothing": b"",
    "half": json.dumps(dataclasses.asdict(COMMIT)).encode()[:-9],
    "a list": b"[1]",
    "null": b"null",
    "not text": b"\xff\xfe{}",
    "a key that is missing": b'{"train": "t"}',
    "a word for a number": json.dumps(dataclasses.asdict(COMMIT) | {"step": "1"}).encode(),
    "a truth for a number": json.dumps(dataclasses.asdict(COMMIT) | {"step": True}).encode(),
    "a number for a word": json.dumps(dataclasses.asdict(COMMIT) | {"host": 1}).encode(),
    "files that are no pairs": json.dumps(dataclasses.asdict(COMMIT) | {"files": {"a": [1]}}).encode(),
    "files that are a list": json.dumps(dataclasses.asdict(COMMIT) | {"files": []}).encode(),
    "very deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_no_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "commit.json").write_bytes(content)
    assert read(tmp_path / "commit.json", Commit) is None


def test_a_key_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "commit.json").write_text(json.dumps(dataclasses.asdict(COMMIT) | {"later": [1]}))
    assert read(tmp_path / "commit.json", Commit) == COMMIT
