"""Names of packed items, which no file has."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.packed import Packed, check, name_of, parse, real
from ckptsync.model import Extent
from ckptsync.paths import checked_path


@pytest.mark.parametrize("file", ["__0_0.distcp", "a b/__0_0.distcp", "ünï/12"])
def test_a_name_says_all_of_a_packed_item(file: str) -> None:
    packed = Packed(Extent(file, 7, 1 << 40), 704, 12)
    assert parse(name_of(packed)) == packed
    assert real(Extent(name_of(packed), 3, 4)) == packed.item


def test_no_file_can_have_such_a_name() -> None:
    with pytest.raises(Corrupt):
        checked_path(name_of(Packed(Extent("f", 0, 1))))
    assert parse("__0_0.distcp") is None
    assert real(Extent("f", 3, 4)) == Extent("f", 3, 4)


@pytest.mark.parametrize("descriptors", [["stream.zstd/1"], ("stream.zstd/1",), ["stream.zstd/1.2"]])
def test_zstd_is_known(descriptors: object) -> None:
    check(descriptors)


@pytest.mark.parametrize(
    "descriptors", [["stream.zstd/2"], ["aes/1"], ["stream.zstd/1", "aes/1"], ["stream.zstd"], [""], ["stream.zstd/"]]
)
def test_anything_else_is_refused_by_its_name(descriptors: list[str]) -> None:
    with pytest.raises(Unsupported, match="transform_descriptors"):
        check(descriptors)


@pytest.mark.parametrize("descriptors", [7, "stream.zstd/1", [7], {"stream.zstd/1": 1}])
def test_what_is_no_list_of_names_is_corrupt(descriptors: object) -> None:
    with pytest.raises(Corrupt):
        check(descriptors)
