"""Stores of fsspec's back ends: the contract, errors, times, and the one step that gives a name."""

from __future__ import annotations

import errno
import gc
import logging
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ckptsync.errors import (
    ConfigError,
    Corrupt,
    Exists,
    Incomplete,
    NotFound,
    StoreError,
    Transient,
    Unsupported,
)
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.fsspec import NOTE, GenericStore, error_for, mtime_of
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import create_store
from ckptsync.stores.urls import Remote, located
from tests.support.rate_limits import Counted
from tests.support.store_contract import StoreContract, content_of, dies_after, names, race

fsspec = pytest.importorskip("fsspec")

from fsspec.registry import _registry  # noqa: E402
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem  # noqa: E402


def remote(url: str) -> Remote:
    place = located(url)
    assert isinstance(place, Remote)
    return place


class NotExclusive(StoreContract):
    """Who looks and then writes does not see who does the same: all that can be promised is that
    one of them is seen whole.
    """

    def test_of_many_creators_exactly_one_wins(self, store: Store, again: Store) -> None:
        assert any(race(lambda n: (store, again)[n % 2].create("deep/er/a", content_of(n))))
        assert read_all(store, "deep/er/a") in [b"".join(content_of(n)) for n in range(8)]
        assert names(store) == ["deep/er/a"]


class TestMemory(NotExclusive):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{uuid.uuid4().hex}/checkpoints"

    @pytest.fixture
    def store(self, url: str) -> Store:
        return GenericStore(remote(url))

    @pytest.fixture
    def again(self, url: str) -> Store:
        return GenericStore(remote(url))


class TestLocal(NotExclusive):
    """fsspec's own local file system, which moves files to their names as SMB does."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return GenericStore(remote(f"local://{tmp_path}/s"))

    @pytest.fixture
    def again(self, tmp_path: Path) -> Store:
        return GenericStore(remote(f"local://{tmp_path}/s"))


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_it_says_once_that_nothing_is_continued(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        store = create_store(url)
        store.write("a", [b"x"])
        read_all(GenericStore(remote(url)), "a")
    made = f"{url}: created a new store"
    messages = [record.message for record in caplog.records]
    assert messages == [f"{url}: {NOTE}", made], "and not to who reads"
    assert not store.is_exclusive


@pytest.mark.parametrize("chunks", [[b"x" * 10], dies_after(b"x" * 5)], ids=["announced", "dead"])
def test_what_is_not_finished_leaves_nothing_behind(tmp_path: Path, chunks: list[Chunk]) -> None:
    store = GenericStore(remote(f"local://{tmp_path}"))
    with pytest.raises((RuntimeError, Incomplete)):
        store.write("run/a", chunks, About(9))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_who_was_first_while_a_file_was_sent_is_seen_before_its_name_is_given(
    tmp_path: Path,
) -> None:
    store, rival = (GenericStore(remote(f"local://{tmp_path}")) for _ in range(2))

    def slow() -> Iterator[bytes]:
        yield b"mine, "
        rival.write("run/a", [b"theirs"])
        yield b"too late"

    with pytest.raises(Exists):
        store.create("run/a", slow())
    assert read_all(store, "run/a") == b"theirs"
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["a"]


def test_a_killed_write_is_not_listed_nor_can_be_named(tmp_path: Path) -> None:
    store = GenericStore(remote(f"local://{tmp_path}"))
    (tmp_path / ".ckptsync/unfinished").mkdir(parents=True)
    (tmp_path / ".ckptsync/unfinished/00.part").write_bytes(b"half")
    assert names(store) == names(store, ".ckptsync/") == store.dirs(".ckptsync/") == []
    for call in (store.size, store.delete, lambda name: store.write(name, [b""])):
        with pytest.raises(Corrupt):
            call(".ckptsync/unfinished/00.part")


def test_listings_are_not_remembered(url: str) -> None:
    cache = GenericStore(remote(url))._fs.dircache
    cache["/run"] = [{"name": "/run/deleted since", "size": 1, "type": "file"}]
    assert "/run" not in cache


def test_links_are_no_names(tmp_path: Path) -> None:
    store = GenericStore(remote(f"local://{tmp_path}/s"))
    store.write("a", [b"x"])
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "s/link").symlink_to(tmp_path / "secret")
    assert names(store) == ["a"]
    with pytest.raises(NotFound):
        store.size("link")


def test_bytes_are_asked_for_in_small_pieces_both_ways(url: str) -> None:
    pace = Counted()
    store = GenericStore(remote(url), limits=Limits(pace))
    store.write("a", [bytes(600 << 10)])
    store.read_into("a", 0, memoryview(bytearray(300 << 10)))
    assert sum(pace.taken) == 900 << 10
    assert max(pace.taken) <= pace.piece


def test_bytes_that_are_lost_on_the_way_are_noticed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    store = GenericStore(remote(url))
    store.write("a", [b"0123456789"])
    whole = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda *args, **ranges: whole(*args, **ranges)[:-1]
    )
    with pytest.raises(StoreError, match="4 of 5 bytes came"):
        store.read_into("a", 2, memoryview(bytearray(5)))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda fs, path, **_: whole(fs, path))
    with pytest.raises(StoreError, match="does not support ranges"):
        store.read_into("a", 2, memoryview(bytearray(5)))
    monkeypatch.setattr(MemoryFile, "write", lambda _file, _data: 0)
    with pytest.raises(StoreError, match="the store has 0 bytes, 3 were uploaded"):
        store.write("b", [b"abc"])


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("az", "adlfs")])
def test_a_package_that_is_not_installed_is_named(scheme: str, package: str) -> None:
    if fsspec.utils.get_package_version_without_import(package):
        pytest.skip("it is installed here")
    with pytest.raises(ConfigError, match=f"package for {scheme}:// is not installed") as caught:
        create_store(f"{scheme}://bucket/x")
    assert f"pip install {package}" in caught.value.hint


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "smb://host/share/x", "webdav://host/x", "dav://host/x", "dir://x"]
)
def test_a_scheme_that_cannot_keep_the_contract_is_refused_by_name(url: str) -> None:
    with pytest.raises(Unsupported, match=f"^{url}: [a-z]+:// stores are not supported") as caught:
        create_store(url)
    assert "s3:// or sftp://" in caught.value.hint


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("hunter2"), "cannot be opened: ValueError"),
        (ImportError("install cloudfs"), "not installed: install cloudfs"),  # of no module
    ],
)
def test_a_class_that_cannot_be_made_is_told_without_values_of_options(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(AbstractFileSystem):  # type: ignore[misc]
        def __init__(self, **_: object) -> None:
            raise raised

    with pytest.raises(ConfigError, match=said) as caught:
        store_on(Picky, "gs", monkeypatch)
    assert "hunter2" not in str(caught.value) + caught.value.hint
    assert "''" not in caught.value.hint


def test_where_a_name_cannot_be_given_in_one_step_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Copies(AbstractFileSystem):  # type: ignore[misc]  # fsspec says nothing of its types
        def info(self, path: str, **_: object) -> None:
            raise FileNotFoundError(path)

    with pytest.raises(StoreError, match="atomically"):
        store_on(Copies, "copies", monkeypatch).write("a", [b"x"])


class HTTPError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("https://host/x?sig=hunter2")
        self.status_code = status


TransportError = type("TransportError", (Exception,), {})
ResourceNotFoundError = type("ResourceNotFoundError", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (FileNotFoundError("x"), NotFound, "not found"),
        (NotADirectoryError("x"), NotFound, "not found"),
        (HTTPError(404), NotFound, "not found"),
        (PermissionError("x"), StoreError, "permission denied"),
        (HTTPError(403), StoreError, "permission denied"),
        (HTTPError(401), StoreError, "permission denied"),
        (HTTPError(507), StoreError, "no room"),
        (HTTPError(400), StoreError, "HTTP 400"),
        (HTTPError(429), Transient, "answered 429"),
        (HTTPError(423), Transient, "answered 423"),
        (HTTPError(500), Transient, "answered 500"),
        (HTTPError(499), StoreError, "HTTP 499"),
        (HTTPError(99), StoreError, "failed with HTTPError"),
        (OSError(errno.EIO, "Input/output error"), Transient, "input/output"),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError, "no space left"),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), Transient, "reset by peer"),
        (TimeoutError(), Transient, "TimeoutError"),
        (TransportError("hunter2"), Transient, "TransportError"),
        (ResourceNotFoundError("hunter2"), NotFound, "not found"),
        (NotImplementedError(), StoreError, "cannot do that"),
        (FileExistsError("x"), StoreError, "stands where"),
        (RuntimeError("hunter2"), StoreError, "RuntimeError"),
    ],
)
def test_each_is_permanent_or_passing_and_repeats_no_message(
    error: Exception, kind: type[StoreError], said: str
) -> None:
    found = error_for("gs://b/x", error)
    assert type(found) is kind
    assert str(found).startswith("gs://b/x: ")
    assert said in str(found)
    assert "hunter2" not in str(found) + found.hint


AT = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


@pytest.mark.parametrize(
    ("info", "time"),
    [
        ({"mtime": AT}, AT),
        ({"created": AT}, AT),
        ({"mtime": int(AT), "created": 5.0}, AT),
        ({"LastModified": datetime.fromtimestamp(AT, timezone.utc)}, AT),
        ({"last_modified": datetime.fromtimestamp(AT, timezone(timedelta(hours=3)))}, AT),
        ({"modified": datetime(2023, 11, 14, 22, 13, 20)}, AT),  # noqa: DTZ001 - some say no zone, and mean UTC
        ({"updated": "2023-11-14T22:13:20Z"}, AT),
        ({"updated": "2023-11-14T22:13:20.000Z"}, AT),
        ({}, 0.0),
        ({"mtime": None}, 0.0),
        ({"modified": "yesterday"}, 0.0),
    ],
)
def test_a_time_is_found_however_it_is_said(info: dict[str, object], time: float) -> None:
    assert mtime_of(info) == time


class Shelf(AbstractFileSystem):  # type: ignore[misc]  # fsspec says nothing of its types
    """Publishes on close, as Google's and Azure's do: blocks are kept aside until the last one."""

    cachable = False

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}

    def info(self, path: str, **_: object) -> dict[str, object]:
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.files[path]), "type": "file"}

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


def store_on(cls: type, scheme: str, monkeypatch: pytest.MonkeyPatch) -> GenericStore:
    """A store on a file system that fsspec takes for that of a scheme."""
    monkeypatch.setitem(_registry, scheme, cls)
    return GenericStore(remote(f"{scheme}://b"))


def test_an_object_appears_when_its_file_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_on(Shelf, "gs", monkeypatch)
    store.write("a", [b"0123", b"456", b""])
    assert list(store._fs.files.values()) == [b"0123456"]
    monkeypatch.setattr(Upload, "_upload_chunk", lambda *_, **__: True)
    with pytest.raises(Transient, match="not found after it was written"):
        store.write("b", [b"swallowed"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_object_whose_source_dies_never_appears_also_not_when_its_file_is_collected(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    gc.freeze()  # looking through what other tests left takes half a second

    def dying() -> Iterator[bytes]:
        yield from [b"0123"] * count
        raise RuntimeError("the source is gone")

    store = store_on(Shelf, "az", monkeypatch)
    with pytest.raises(RuntimeError, match="the source is gone"):
        store.write("a", dying())
    gc.collect()
    assert store._fs.files == {}


def test_an_object_whose_name_is_taken_meanwhile_does_not_appear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.freeze()
    store = store_on(Shelf, "abfs", monkeypatch)

    def slow() -> Iterator[bytes]:
        yield b"0123456"
        store._fs.files[store._path("a")] = b"theirs"

    with pytest.raises(Exists):
        store.create("a", slow())
    gc.collect()
    assert list(store._fs.files.values()) == [b"theirs"]
