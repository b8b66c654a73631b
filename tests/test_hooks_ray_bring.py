from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray import as_directory
from ckptsync.hooks.ray_bring import bring
from ckptsync.hooks.ray_note import Note
from ckptsync.hooks.ray_upload import Part, send
from tests.ray_checkpoints import Checkpoint, Disk

NAME = "checkpoint_000001"


def sent(tmp_path: Path, text: str = "0") -> Note:
    (tmp_path / "tmp0").mkdir()
    (tmp_path / "tmp0" / "zero").write_text(text)
    note = send(tmp_path / "tmp0", str(tmp_path / "store"), Part("sft", NAME, 0, 30, attempt=str(tmp_path)))
    assert note is not None
    return note


def test_rays_checkpoint_is_as_a_directory_what_was_sent(tmp_path: Path) -> None:
    ray_note.write(Disk(), str(tmp_path / "experiment" / NAME), sent(tmp_path))
    with as_directory(Checkpoint(str(tmp_path / "experiment" / NAME))) as brought:
        assert {path.name: path.read_text() for path in Path(brought).iterdir()} == {"zero": "0"}
    assert not Path(brought).exists()
    with as_directory(Checkpoint(str(tmp_path / "tmp0"))) as own:
        assert own == str(tmp_path / "tmp0")


def test_what_is_damaged_in_the_store_is_not_given(tmp_path: Path) -> None:
    note = sent(tmp_path, "0" * 100)
    (tmp_path / "store" / "sft" / NAME / "zero").write_text("1" * 100)
    with pytest.raises((Incomplete, Corrupt), match="zero"):
        bring(note, tmp_path / "back")


def test_a_record_that_cannot_be_read_is_said_and_nothing_is_given(tmp_path: Path) -> None:
    note = sent(tmp_path)
    (record,) = (tmp_path / "store" / "sft" / ".ckptsync" / NAME).glob("manifest-*")
    record.chmod(0o644)
    record.write_text("{}")
    with pytest.raises(Corrupt, match="manifest"):
        bring(note, tmp_path / "back")


def test_what_the_store_has_let_go_is_not_there(tmp_path: Path) -> None:
    note = sent(tmp_path)
    for record in (tmp_path / "store" / "sft" / ".ckptsync" / NAME).glob("manifest-*"):
        record.unlink()
    with pytest.raises(Incomplete, match=f"sft/{NAME}: no manifest of it counts"):
        bring(note, tmp_path / "back")
