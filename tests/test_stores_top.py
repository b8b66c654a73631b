from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.model import read_whole
from ckptsync.stores import top


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """As the Hugging Face cache lays a model out: links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1234").write_bytes(b"{}")
    place = tmp_path / "snapshot"
    (place / "below").mkdir(parents=True)
    (place / "below" / "config.json").write_bytes(b"deep")
    (place / "config.json").symlink_to("../blobs/1234")
    (place / "broken.json").symlink_to("../blobs/5678")
    (place / "tokenizer.json").write_bytes(b"real")
    return place


def test_links_in_a_directory_that_was_named_are_followed(snapshot: Path) -> None:
    files = top.named(str(snapshot))
    assert files.sizes() == {"config.json": 2, "tokenizer.json": 4}
    assert read_whole(files, "config.json") == b"{}"


def test_links_in_a_directory_that_was_found_are_not(snapshot: Path) -> None:
    files = top.around(str(snapshot))
    assert files.sizes() == {"tokenizer.json": 4}
    with pytest.raises(Incomplete):
        read_whole(files, "config.json")


def test_a_file_that_becomes_shorter_is_noticed(snapshot: Path) -> None:
    files = top.around(str(snapshot))
    (snapshot / "tokenizer.json").write_bytes(b"")
    with pytest.raises(Corrupt, match="shorter"):
        read_whole(files, "tokenizer.json")


@pytest.mark.parametrize("look", [top.named, top.around])
def test_what_is_no_directory_is_said_with_what_is_wanted(tmp_path: Path, look: object) -> None:
    for bad in (tmp_path / "absent", Path(__file__)):
        with pytest.raises(ConfigError) as found:
            look(str(bad))  # type: ignore[operator]
        assert "config.json" in found.value.hint
