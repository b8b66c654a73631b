from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.tensors import Extent, read, read_whole


@pytest.fixture
def files(tmp_path: Path) -> DirectoryFiles:
    (tmp_path / "a").write_bytes(b"0123456789")
    return DirectoryFiles(str(tmp_path))


def test_an_extent_reads_as_exactly_its_bytes(files: DirectoryFiles) -> None:
    assert read(files, Extent("a", 2, 3)) == b"234"
    assert read(files, Extent("a", 10, 0)) == b""
    with pytest.raises(Corrupt):
        read(files, Extent("a", 8, 3))


def test_a_small_file_is_read_whole_and_a_big_one_is_refused(files: DirectoryFiles) -> None:
    assert read_whole(files, "a", limit=10) == b"0123456789"
    with pytest.raises(Corrupt, match="a: 10 bytes, at most 9 expected"):
        read_whole(files, "a", limit=9)
    with pytest.raises(Incomplete, match="b: not found"):
        read_whole(files, "b")
