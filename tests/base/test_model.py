from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.stores.file_trees import DirectoryFiles
from ckptsync.tensors import Copy, Demands, Extent, Part, Tensor, read, read_whole


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


def test_extents_sort_by_file_and_location() -> None:
    extents = [Extent("b", 0, 1), Extent("a", 9, 1), Extent("a", 10, 1)]
    assert sorted(extents) == [extents[1], extents[2], extents[0]]


@pytest.mark.parametrize("noun", [Extent, Part, Copy, Tensor, Demands])
def test_nouns_are_frozen_values_without_a_dict(noun: type) -> None:
    assert dataclasses.is_dataclass(noun)
    assert noun.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(noun)


def test_demands_say_nothing_until_a_layout_does() -> None:
    assert Demands() == Demands({}, {}, None)
    assert Demands().model is not Demands().model
