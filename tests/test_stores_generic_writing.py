"""What the file systems on real servers show is in test_stores_generic.py; here are those for which there is no server here."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckptsync.errors import Exists, StoreError
from ckptsync.stores.generic.errors import sorted_error
from ckptsync.stores.generic.writing import Job, way_of

pytest.importorskip("fsspec")

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Shelf(AbstractFileSystem):  # type: ignore[misc]  # fsspec says nothing of its types
    """Publishes on close, as Google's and Azure's do: blocks are kept aside until the last one."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}

    def _open(self, path: str, mode: str, block_size: int = 0, **_: object) -> Upload:
        return Upload(self, path, mode, block_size=4)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.kept = b""

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT001, FBT002 - fsspec's own
        self.kept += self.buffer.getvalue()
        if final:
            self.fs.files[self.path] = self.kept
        return True


def pieces(*given: bytes) -> Iterator[memoryview]:
    yield from (memoryview(one) for one in given)


def told(e: Exception) -> StoreError:
    return sorted_error("gs://b/a", e)


def test_an_object_appears_when_its_file_is_closed() -> None:
    shelf = Shelf()
    way_of("gs", shelf)(Job(shelf, "b", "b/a", pieces(b"0123", b"456", b""), told, lambda: None, replaces=True))
    assert shelf.files == {"b/a": b"0123456"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_object_whose_source_dies_never_appears_also_not_when_its_file_is_collected(count: int) -> None:
    def dying() -> Iterator[memoryview]:
        yield from pieces(*[b"0123"] * count)
        raise RuntimeError("the source is gone")

    shelf = Shelf()
    with pytest.raises(RuntimeError, match="the source is gone"):
        way_of("az", shelf)(Job(shelf, "b", "b/a", dying(), told, lambda: None, replaces=True))
    gc.collect()
    assert shelf.files == {}


def test_an_object_whose_name_is_taken_meanwhile_does_not_appear() -> None:
    def taken() -> None:
        raise Exists("b/a: already there")

    shelf = Shelf()
    with pytest.raises(Exists):
        way_of("abfs", shelf)(Job(shelf, "b", "b/a", pieces(b"0123456"), told, taken, replaces=False))
    gc.collect()
    assert shelf.files == {}


def test_a_server_that_refuses_to_move_onto_a_file_still_replaces_it() -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class Refuses(MemoryFileSystem):  # type: ignore[misc]
        def mv(self, path1: str, path2: str, **_: object) -> None:
            if self.exists(path2):
                raise OSError("rename refused")
            super().mv(path1, path2)

    fs = Refuses(global_store=False, skip_instance_cache=True)
    for content in (b"old", b"new"):
        way_of("hdfs", fs)(Job(fs, "/s", "/s/a", pieces(content), told, lambda: None, replaces=True))
    assert fs.cat_file("/s/a") == b"new"
    assert fs.find("/s") == ["/s/a"]
