from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError, Unsupported
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import NoParent, create_store, directory_of, is_store, open_store
from ckptsync.stores.urls import path_of
from tests.support.rate_limits import Counted


def test_a_store_is_made_once_and_found_by_path_and_url(tmp_path: Path) -> None:
    url = str(tmp_path / "with space" / "store")
    assert not is_store(url)
    (tmp_path / "with space").mkdir()
    create_store(url).write("a", [b"x"])
    create_store(url)
    quoted = "file://" + url.replace(" ", "%20")
    assert is_store(url)
    assert is_store(quoted)
    for found in (open_store(url), open_store(quoted), open_store(open_store(url).url)):
        assert [e.name for e in found.names("")] == [STORE_FILE, "a"]
    assert json.loads(Path(url, STORE_FILE).read_bytes()) == {"format": 1}


def test_many_may_make_a_store_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        urls = {
            store.url
            for store in pool.map(lambda _: create_store(str(tmp_path / "store")), range(16))
        }
    assert urls == {str(tmp_path / "store")}


def test_a_store_is_made_only_in_a_directory_that_is_there_and_once_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoParent, match=r"there is no directory .*/mistyped$") as caught:
        create_store(str(tmp_path / "mistyped/store"))
    assert "mount" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        create_store(str(tmp_path / "store"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/store: created a new store"
    ]


def test_readers_make_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory") as caught:
        open_store(str(tmp_path / "nowhere"))
    assert "mount" in caught.value.hint
    with pytest.raises(ConfigError, match="not a store"):
        open_store(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["nosuch://x", "NoSuch://x/y"])
def test_a_scheme_that_nobody_knows_is_told_by_name_with_those_that_are(url: str) -> None:
    pytest.importorskip("fsspec")
    for call in (open_store, create_store, is_store):
        with pytest.raises(ConfigError, match="nosuch://") as caught:
            call(url)
        assert "a path, s3://, sftp://" in caught.value.hint
        assert "webdav" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    ["", "a\0b", "s3:/bucket", "host:/path", "file://host/path", "~nobody-of-this-name/store"],
)
def test_nonsense_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError):
        path_of(url)


def test_a_path_is_made_absolute_and_home_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "odd:").mkdir()
    assert path_of("store") == str(tmp_path / "store")
    assert path_of("~/store") == "/home/me/store"
    assert path_of("./odd:/x") == str(tmp_path / "odd:/x")
    assert path_of("file:///a%20b") == "/a b"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"format":2}', Unsupported),
        (b'{"format":"x"}', Corrupt),
        (b'{"format":true}', Corrupt),
        (b'{"format":1.0}', Corrupt),
        (b'{"format":0}', Corrupt),
        (b'{"format":%s}' % (b"9" * 5000), Corrupt),
        (b'{"format":1}' + b" " * (1 << 16), Corrupt),
        (b'{"format":"\xff"}', Corrupt),
        (b"{}", Corrupt),
        (b"[1]", Corrupt),
        (b"", Corrupt),
        (b"\xff", Corrupt),
    ],
)
def test_a_newer_or_broken_store_is_refused(
    tmp_path: Path, content: bytes, error: type[CkptsyncError]
) -> None:
    (tmp_path / ".ckptsync").mkdir()
    (tmp_path / STORE_FILE).write_bytes(content)
    for call in (open_store, create_store):
        with pytest.raises(error, match=r"format|65536 expected"):
            call(str(tmp_path))
    assert (tmp_path / STORE_FILE).read_bytes() == content


def test_where_no_store_can_be_made_the_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"file/store: no store can be made here: not a directory"
    ):
        create_store(str(tmp_path / "file/store"))


def test_a_path_takes_no_storage_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key, secret"):
        create_store(str(tmp_path), {"secret": 1, "key": 2})
    create_store(str(tmp_path), {})


def test_a_store_whose_file_system_is_unmounted_is_no_empty_store(tmp_path: Path) -> None:
    root, there = tmp_path / "store", tmp_path / "elsewhere"
    create_store(str(root)).write("a", [b"x"])
    stores = [open_store(str(root)), create_store(str(root))]
    root.rename(there)
    root.mkdir()  # the directory that it was mounted on
    for store in stores:
        for deed in (
            lambda s: list(s.names("")),
            lambda s: s.size("a"),
            lambda s: s.write("b", [b"y"]),
            lambda s: s.delete("a"),
        ):
            with pytest.raises(StoreError, match="directory expected") as caught:
                deed(store)
            assert "mount" in caught.value.hint
    assert list(root.iterdir()) == []
    root.rmdir()
    there.rename(root)
    assert [[e.name for e in store.names("")] for store in stores] == [[STORE_FILE, "a"]] * 2


def test_another_store_in_its_place_is_not_taken_for_it(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    create_store(str(tmp_path / "store"))
    with pytest.raises(StoreError, match="not the store that was opened"):
        store.write("a", [b"x"])


def test_a_directory_is_known_through_whatever_is_around_it(tmp_path: Path) -> None:
    pace = Counted()
    store = create_store(str(tmp_path), limits=Limits(pace))
    pace.taken.clear()
    store.write("a", [bytes(300_000)])
    store.read_into("a", 0, memoryview(bytearray(1000)))
    assert sum(pace.taken) == 301_000
    assert directory_of(store) == directory_of(open_store(str(tmp_path))) == str(tmp_path)
    assert directory_of(MemoryStore()) is None
