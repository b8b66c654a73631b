"""What is read is exactly one of the dataclasses, or nothing."""

from __future__ import annotations

import dataclasses
import json
import os
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
    "all brackets": b"[" + b"[]," * 1_000_000 + b"[]]",
    "a number of 400 digits": json.dumps(dataclasses.asdict(COMMIT)).replace('"at": ', f'"at": {"9" * 400}').encode(),
    "a number of 5000 digits": json.dumps(dataclasses.asdict(COMMIT)).replace('"at": ', f'"at": {"9" * 5000}').encode(),
    "a number that no record holds": json.dumps(dataclasses.asdict(COMMIT) | {"step": 2**63}).encode(),
    "a time that is none": json.dumps(dataclasses.asdict(COMMIT) | {"at": float("nan")}).encode(),
    "a word that is no UTF-8": json.dumps(dataclasses.asdict(COMMIT) | {"host": "\ud800"}).encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_no_file(spool: Path, content: bytes) -> None:
    (spool / "commit.json").write_bytes(content)
    assert read(spool / "commit.json", Commit) is None


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "device", "huge"])
def test_what_is_no_small_file_is_no_file_and_nobody_waits_for_it(spool: Path, kind: str) -> None:
    path = spool / "commit.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (spool / "real.json").write_text(json.dumps(dataclasses.asdict(COMMIT)))
        path.symlink_to("real.json")
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    assert read(path, Commit) is None


def test_a_key_of_a_later_version_is_ignored(spool: Path) -> None:
    (spool / "commit.json").write_text(json.dumps(dataclasses.asdict(COMMIT) | {"later": [1]}))
    assert read(spool / "commit.json", Commit) == COMMIT
