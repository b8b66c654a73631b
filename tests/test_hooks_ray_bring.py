from __future__ import annotations

import os
import tempfile
import threading
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


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint in a store, and a node's own location for what is only for a while."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    ray_note.write(Disk(), str(tmp_path / "experiment" / NAME), sent(tmp_path))
    return Checkpoint(str(tmp_path / "experiment" / NAME))


def test_the_ranks_of_a_node_share_what_the_first_has_brought(tmp_path: Path, reported: Checkpoint) -> None:
    with as_directory(reported) as first:
        (tmp_path / "store" / "sft" / NAME / "zero").unlink()
        with as_directory(reported) as second:
            assert second == first
        assert (Path(first) / "zero").read_text() == "0"
    with pytest.raises(Incomplete), as_directory(reported):
        pass
    assert [path.name for path in (tmp_path / "node").glob("*/*")] == ["lock"]


def test_ranks_that_come_and_go_at_once_all_have_it(tmp_path: Path, reported: Checkpoint) -> None:
    seen = list[str]()

    def rank() -> None:
        for _ in range(20):
            with as_directory(reported) as brought:
                seen.append((Path(brought) / "zero").read_text())

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert seen == ["0"] * 80
    assert [path.name for path in (tmp_path / "node").glob("*/*")] == ["lock"]


def test_what_a_killed_rank_had_half_brought_is_brought_anew(tmp_path: Path, reported: Checkpoint) -> None:
    with as_directory(reported) as brought:
        half = Path(brought).parent
    for left in (half, half.with_name(half.name[:-1])):
        (left / NAME).mkdir(parents=True)
        (left / NAME / "half").touch()
    with as_directory(reported) as brought:
        assert [path.name for path in Path(brought).iterdir()] == ["zero"]
        assert [path for path in half.parent.iterdir() if path.is_dir()] == [half]


@pytest.mark.skipif(os.getuid() != 0, reason="makes directories of another user")
def test_what_another_user_has_put_there_is_neither_given_nor_in_the_way(tmp_path: Path, reported: Checkpoint) -> None:
    with as_directory(reported) as brought:
        home = Path(brought).parent
    (home.parent / "lock").unlink()
    home.parent.rmdir()
    (home / NAME).mkdir(parents=True)
    (home / NAME / "zero").write_text("evil")
    (home / ".whole").touch()
    (home.parent.with_name(f"ckptsync-ray-{os.getuid()}.lock")).symlink_to("/dev/null")
    (home.parent.with_name(f"ckptsync-ray-{os.getuid()}-0")).symlink_to(tmp_path)
    os.chown(home.parent, 65534, 65534)
    with as_directory(reported) as brought:
        assert (Path(brought) / "zero").read_text() == "0"
        above = Path(brought).parents[1].stat()
        assert (above.st_uid, above.st_mode & 0o777) == (os.getuid(), 0o700)


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
