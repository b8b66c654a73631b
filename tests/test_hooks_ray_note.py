from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_note import Note
from tests.ray_checkpoints import Checkpoint, Disk

NOTE = Note("s3://bucket/checkpoints", "sft", "checkpoint_000001", "checkpoint_000001~ab12")


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "experiment" / "checkpoint_000001"
    ray_note.write(Disk(), str(folder), NOTE)
    ray_note.write(Disk(), str(folder), NOTE)  # another rank
    assert ray_note.read(Checkpoint(str(folder))) == NOTE
    assert [path.name for path in folder.iterdir()] == ["ckptsync.json"]


def test_a_checkpoint_that_holds_its_files_has_none(tmp_path: Path) -> None:
    assert ray_note.read(Checkpoint(str(tmp_path))) is None


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b'{"store": "/s"}',
        b"[" * 100_000,
        json.dumps({"store": "/s", "run": "r", "checkpoint": "../c", "location": "p"}).encode(),
        json.dumps({"store": "/s", "run": "", "checkpoint": "c", "location": "p"}).encode(),
        json.dumps({"store": "/s", "run": 1, "checkpoint": "c", "location": "p"}).encode(),
    ],
)
def test_what_is_no_note_is_refused(told: bytes) -> None:
    with pytest.raises(Corrupt, match="note of a checkpoint"):
        ray_note.decode(told, "ckptsync.json")


def test_names_that_no_store_could_keep_are_not_plain() -> None:
    names = ("checkpoint_2026-11-21_20-00-00.123456", "epoch=1", "a/b", ".hidden", "")
    assert [name for name in names if ray_note.is_plain(name)] == [names[0]]
