"""Files get their names once, and no other bytes come under them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists
from ckptsync.head.placing import InTheWay, Writing, is_whole, placed, proven
from ckptsync.records.model_record import ModelFile
from ckptsync.stores.contract import UNKNOWN, About, Chunk
from ckptsync.stores.memory import MemoryStore
from tests.filled import read

FILE = ModelFile("m", 5, digest(b"model"))


class Mute(MemoryStore):
    """Says that a name is taken, and nothing of the bytes, as some servers do."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        try:
            super().create(name, chunks, about)
        except Exists as e:
            raise Exists(str(e)) from None


@pytest.mark.parametrize("store", [MemoryStore(), Mute()])
def test_what_is_there_already_is_left_if_it_is_the_same_and_in_the_way_if_not(store: MemoryStore) -> None:
    writing = Writing(store, "c/", {})
    writing.put("m", [b"mo", b"del"])
    writing.put("m", iter([b"mod", b"el"]))
    for other in (b"models", b"madel", b""):
        with pytest.raises(InTheWay) as caught:
            writing.put("m", [other])
        assert caught.value.name == "c/m"
    assert read(store, "c/m") == b"model"


@pytest.mark.parametrize("store", [MemoryStore(), Mute()])
def test_who_comes_second_learns_that_other_bytes_lie_there(store: MemoryStore) -> None:
    assert [placed(store, "x", data) for data in (b"one", b"two", b"one")] == [True, False, True]
    assert read(store, "x") == b"one"


def test_only_the_very_bytes_are_whole() -> None:
    store = MemoryStore()
    assert not is_whole(store, "m", FILE)
    for data, expected in ((b"model", True), (b"nodel", False), (b"mode", False)):
        store.write("m", [data])
        assert is_whole(store, "m", FILE) is expected


def test_other_bytes_than_the_consolidated_ones_end_in_an_error_after_the_last() -> None:
    assert b"".join(proven([b"mo", b"del"], FILE)) == b"model"
    with pytest.raises(Corrupt, match="not what the model record says"):
        list(proven([b"nodel"], FILE))
