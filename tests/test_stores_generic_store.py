from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.generic.store import NOTE, GenericStore
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import create_store, open_store
from ckptsync.stores.retry import Persistence, Retrying
from ckptsync.stores.urls import Remote, located
from tests.paced import Counted
from tests.store_contract import StoreContract, dies_after, names

fsspec = pytest.importorskip("fsspec")


def remote(url: str) -> Remote:
    place = located(url)
    assert isinstance(place, Remote)
    return place


class NotExclusive(StoreContract):
    """Who looks and then writes does not see who does the same: all that can be promised is that one of them is seen whole."""

    def test_of_many_creators_exactly_one_wins(self, store: Store, again: Store) -> None:
        def race(n: int) -> bool:
            try:
                (store, again)[n % 2].create("deep/er/a", [b"%d" % n, b"!" * 1000])
            except Exists:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(race, range(8)))
        assert any(won)
        assert read_all(store, "deep/er/a") in [b"%d" % n + b"!" * 1000 for n in range(8)]
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
    """fsspec's own local file system, which moves files to their names as SMB and HDFS do."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return GenericStore(remote(f"local://{tmp_path}/s"))

    @pytest.fixture
    def again(self, tmp_path: Path) -> Store:
        return GenericStore(remote(f"local://{tmp_path}/s"))


class TestDirectory(NotExclusive):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return GenericStore(remote("dir://s"), {"path": str(tmp_path), "target_protocol": "file"})

    @pytest.fixture
    def again(self, tmp_path: Path) -> Store:
        return GenericStore(remote("dir://s"), {"path": str(tmp_path), "target_protocol": "file"})


@pytest.fixture(scope="module")
def dav(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's URL, and the directory that it serves."""
    pytest.importorskip("webdav4")
    pytest.importorskip("wsgidav")
    from tests.dav import served

    directory = tmp_path_factory.mktemp("dav")
    with served(directory) as url:
        yield url, directory


class TestWebdav(NotExclusive):
    @pytest.fixture
    def place(self) -> Remote:
        return remote(f"webdav://{uuid.uuid4().hex}/checkpoints")

    @pytest.fixture
    def store(self, place: Remote, dav: tuple[str, Path]) -> Iterator[Store]:
        yield from self.opened(place, dav[0])

    @pytest.fixture
    def again(self, place: Remote, dav: tuple[str, Path]) -> Iterator[Store]:
        yield from self.opened(place, dav[0])

    @staticmethod
    def opened(place: Remote, base: str) -> Iterator[Store]:
        store = GenericStore(place, {"base_url": base})
        yield store
        store._shared.client.http.close()

    def test_of_many_writers_one_is_seen_whole(self, store: Store) -> None:
        """A server removes what a file is moved onto, so writers get into each other's way: those that try again all come through."""
        super().test_of_many_writers_one_is_seen_whole(Retrying(store, Persistence(60, sleep=lambda _: None)))

    def test_its_clock_is_the_servers(self, store: Store, place: Remote, dav: tuple[str, Path]) -> None:
        store.write("a", [b"x"])
        (entry,) = store.names("")
        assert abs(entry.mtime - (dav[1] / place.rest / "a").stat().st_mtime) <= 1

    def test_what_is_written_never_lies_on_this_machines_disk(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.TemporaryFile", None)  # what webdav4's own file for writing would take
        store.write("big", (bytes(1 << 20) for _ in range(12)), About(12 << 20))
        assert store.size("big") == 12 << 20


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_it_says_once_that_nothing_is_continued(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        store = create_store(url)
        store.write("a", [b"x"])
        read_all(GenericStore(remote(url)), "a")
    made = f"{url}: a new store was made here"
    assert [record.message for record in caplog.records] == [f"{url}: {NOTE}", made], "and not to who reads"
    assert not store.is_exclusive


def test_a_store_is_made_and_found_by_url(url: str) -> None:
    create_store(url).write("run/a", [b"x"])
    assert names(open_store(url), "run/") == ["run/a"]
    with pytest.raises(ConfigError, match="not a store"):
        open_store(url + "/elsewhere")


@pytest.mark.parametrize("chunks", [[b"x" * 10], dies_after(b"x" * 5)], ids=["announced", "dead"])
def test_what_is_not_finished_leaves_nothing_behind(tmp_path: Path, chunks: list[Chunk]) -> None:
    store = GenericStore(remote(f"local://{tmp_path}"))
    with pytest.raises((RuntimeError, Exception)):
        store.write("run/a", chunks, About(9))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_who_was_first_while_a_file_was_sent_is_seen_before_its_name_is_given(tmp_path: Path) -> None:
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
    assert names(store) == names(store, ".ckptsync/") == []
    for call in (store.size, store.delete, lambda name: store.write(name, [b""])):
        with pytest.raises(Corrupt):
            call(".ckptsync/unfinished/00.part")


def test_listings_are_not_remembered(url: str) -> None:
    cache = GenericStore(remote(url))._shared.dircache
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


def test_bytes_that_are_lost_on_the_way_are_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    store = GenericStore(remote(url))
    store.write("a", [b"0123456789"])
    whole = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *args, **ranges: whole(*args, **ranges)[:-1])
    with pytest.raises(StoreError, match="4 of 5 bytes came"):
        store.read_into("a", 2, memoryview(bytearray(5)))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda fs, path, **_: whole(fs, path))
    with pytest.raises(StoreError, match="knows no ranges"):
        store.read_into("a", 2, memoryview(bytearray(5)))
    monkeypatch.setattr(MemoryFile, "write", lambda _file, _data: 0)
    with pytest.raises(StoreError, match="0 bytes are there, 3 were sent"):
        store.write("b", [b"abc"])


@pytest.mark.parametrize(
    ("url", "said", "hint"),
    [
        ("nosuch://x", "nosuch:// are not known", "webdav"),
        ("gs://bucket/x", "package for gs:// is not installed", "pip install gcsfs"),
        ("az://container/x", "package for az:// is not installed", "pip install adlfs"),
        ("smb://host/share/x", "package for smb:// is not installed", "smbprotocol"),
    ],
)
def test_a_kind_that_is_not_known_or_not_installed_is_one_line_and_a_remedy(url: str, said: str, hint: str) -> None:
    if "not installed" in said and fsspec.utils.get_package_version_without_import(hint.rpartition(" ")[2]):
        pytest.skip("it is installed here")
    with pytest.raises(ConfigError, match=said) as caught:
        create_store(url)
    assert hint in caught.value.hint


def test_options_that_are_wrong_are_told_without_their_values() -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened|storage_options") as caught:
        GenericStore(remote("dir://x"), {"path": None, "fs": "hunter2"})
    assert "hunter2" not in str(caught.value) + caught.value.hint


def test_where_a_name_cannot_be_given_in_one_step_nothing_is_written(tmp_path: Path) -> None:
    from fsspec import AbstractFileSystem
    from fsspec.registry import register_implementation

    class Copies(AbstractFileSystem):  # type: ignore[misc]  # fsspec says nothing of its types
        protocol = "copies"

        def info(self, path: str, **_: object) -> None:
            raise FileNotFoundError(path)

    register_implementation("copies", Copies, clobber=True)
    with pytest.raises(StoreError, match="in one step"):
        GenericStore(remote("copies://x")).write("a", [b"x"])
