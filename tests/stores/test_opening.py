"""Paths and URLs, the stores that they mean, and files that an operator names."""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import (
    CkptsyncError,
    ConfigError,
    Corrupt,
    NotFound,
    StoreError,
    Transient,
    Unsupported,
)
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores import path_or_url
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import (
    Access,
    NoParent,
    create_store,
    directory_of,
    is_store,
    open_store,
)
from ckptsync.stores.urls import Remote, located, path_of, shown_url
from ckptsync.tensors import read_whole
from tests.support.rate_limits import Counted
from tests.support.remote_stores import reaching


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
        stores = pool.map(lambda _: create_store(str(tmp_path / "store")), range(16))
        assert {store.url for store in stores} == {str(tmp_path / "store")}


def test_a_store_is_made_only_in_a_directory_that_is_there_and_once_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.path.realpath(f"/proc/self/fd/{fd}"))
    )
    with pytest.raises(NoParent, match=r"there is no directory .*/mistyped$") as caught:
        create_store(str(tmp_path / "mistyped/store"))
    assert "mount" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        create_store(str(tmp_path / "store"))
    assert synced[0] == str(tmp_path), "the new directory's name is durable"
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
        assert "az://" in caught.value.hint


NONSENSE = ("", "a\0b", "s3:/bucket", "s3://", "s3:///", "s3://bucket/a\nb", "host:/path")
PASSWORDS = ("sftp://me:secret@host/srv", "sftp://host:se/cret@x", "gs://:secret@b", "s3://k:s@b/x")


@pytest.mark.parametrize(
    "url", [*NONSENSE, *PASSWORDS, "file://host/path", "~nobody-of-this-name/store"]
)
def test_what_names_no_place_is_a_configuration_error(url: str) -> None:
    for read in (path_of, located):
        with pytest.raises(ConfigError) as caught:
            read(url)
        assert url not in PASSWORDS or url not in str(caught.value)
    assert shown_url(url) == "***"


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
    with pytest.raises(Unsupported, match="s3://bucket"):
        path_of("s3://bucket")


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
    for _ in range(2):
        for store, deed in itertools.product(
            stores,
            (
                lambda s: list(s.names("")),
                lambda s: s.size("a"),
                lambda s: s.write("b", [b"y"]),
                lambda s: s.delete("a"),
            ),
        ):
            with pytest.raises(StoreError, match="directory expected") as caught:
                deed(store)
            assert "mount" in caught.value.hint
            assert type(caught.value) is StoreError
        root.mkdir(exist_ok=True)  # the directory that it was mounted on
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
    opened_store = open_store(str(tmp_path), limits=Limits(pace))
    opened_store.read_into("a", 0, memoryview(bytearray(1000)))
    assert sum(pace.taken) >= 302_000
    assert directory_of(store) == directory_of(opened_store) == str(tmp_path)
    assert directory_of(MemoryStore()) is None


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://bucket/runs/", Remote("s3", "bucket/runs")),
        ("S3A://bucket", Remote("s3", "bucket")),
        ("sftp://me@host:2222//srv/store", Remote("sftp", "me@host:2222//srv/store")),
        (
            "s3://arn:aws:s3:eu-west-1:1:accesspoint/mine/runs",
            Remote("s3", "arn:aws:s3:eu-west-1:1:accesspoint/mine/runs"),
        ),
        ("ssh://host/srv", Remote("sftp", "host/srv")),
        ("sftp://me@[::1]:22/srv", Remote("sftp", "me@[::1]:22/srv")),
        ("gs://bucket/a b", Remote("gs", "bucket/a b")),
        ("file:///srv/my%20store", Path("/srv/my store")),
        ("/srv/s3:x", Path("/srv/s3:x")),
    ],
)
def test_a_url_is_a_place_elsewhere_and_a_path_is_here(url: str, wanted: Path | Remote) -> None:
    assert located(url) == wanted
    assert not isinstance(wanted, Remote) or located(wanted.url) == wanted


BUCKET = Remote("s3", "bucket")
RUN = Remote("s3", "bucket/runs/a")
CHECKPOINT = Remote("s3", "bucket/runs/a/checkpoint-5")


class Guarded(MemoryStore):
    """A store that answers every question about a name with an error."""

    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self.error = error

    def size(self, name: str) -> int:
        raise self.error


def bucket(*names: str) -> Store:
    store = MemoryStore(BUCKET.url)
    for name in names:
        store.write(name, [name.encode()])
    return store


def test_around_a_place_only_what_is_asked_for_is_looked_at_and_no_link(tmp_path: Path) -> None:
    names = ("runs/a/config.json", "runs/a/checkpoint-5/tokenizer.json", "runs/a/other")
    access = reaching({BUCKET: bucket(*names)})
    found = path_or_url.nearby_files(RUN, access, ["config.json", "tokenizer.json"])
    assert found.sizes() == {"config.json": 18}
    assert read_whole(found, "config.json") == b"runs/a/config.json"
    (tmp_path / "config.json").symlink_to(__file__)
    assert path_or_url.nearby_files(tmp_path, access, ["config.json"]).sizes() == {}


def test_who_may_not_look_around_finds_nothing_there_and_a_network_that_fails_is_said() -> None:
    for error in (StoreError("access denied"), NotFound("no such key")):
        access = reaching({BUCKET: Guarded(error)})
        assert path_or_url.nearby_files(RUN, access, ["config.json"]).sizes() == {}
        assert path_or_url.store_above(CHECKPOINT, access) is None
    access = reaching({BUCKET: Guarded(Transient("reset"))})
    with pytest.raises(Transient):
        path_or_url.nearby_files(RUN, access, ["config.json"])


def test_the_store_that_a_place_is_in_is_found_at_any_height() -> None:
    marks: list[str] = []
    for above in (BUCKET, Remote("s3", "bucket/runs"), RUN, CHECKPOINT):
        prefix = above.rest.removeprefix("bucket").lstrip("/")
        marks.append(f"{prefix}/{STORE_FILE}".lstrip("/"))
        access = reaching({BUCKET: bucket(*marks)})
        assert path_or_url.store_above(CHECKPOINT, access) == above, "the nearest one"


def test_a_directory_is_in_the_nearest_store_above_it(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "inner"):
        create_store(str(root))
    for directory in (tmp_path / "inner", tmp_path / "inner/run"):
        enclosing = path_or_url.enclosing_store(directory, Access())
        assert enclosing
        assert directory_of(enclosing[0]) == str(tmp_path / "inner")
        assert enclosing[1] == directory.relative_to(tmp_path / "inner").parts


def test_the_files_of_a_place_that_was_named_are_those_at_its_top() -> None:
    base = Remote("mem", "base")
    store = MemoryStore()
    for name in ("config.json", "model.safetensors", "below/config.json"):
        store.write(name, [b"x"])
    assert path_or_url.top_files(base, reaching({base: store})).sizes() == {
        "config.json": 1,
        "model.safetensors": 1,
    }
    with pytest.raises(ConfigError):
        path_or_url.top_files(base, reaching({base: MemoryStore()}))


@pytest.mark.parametrize(
    ("place", "above"),
    [
        ("s3://bucket/a/b", ["s3://bucket/a", "s3://bucket"]),
        ("s3://bucket", []),
        ("sftp://user@host:22/srv/a", ["sftp://user@host:22/srv"]),
        ("sftp://host/a", []),
    ],
)
def test_around_a_place_are_others_up_to_its_bucket_or_host(place: str, above: list[str]) -> None:
    found = located(place)
    assert isinstance(found, Remote)
    assert [other.url for other in path_or_url.parents(found)] == above


@pytest.mark.parametrize(
    ("place", "other", "is_so"),
    [
        ("s3://b/x", "s3://b/x", True),
        ("s3://b/x/y", "s3://b/x", True),
        ("/x/y", "/x", True),
        ("/xy", "/x", False),
        ("s3://b/xy", "s3://b/x", False),
        ("sftp://b/x/y", "s3://b/x", False),
        ("/x/y", "s3://x", False),
    ],
)
def test_a_place_may_be_inside_another(place: str, other: str, *, is_so: bool) -> None:
    assert path_or_url.is_inside(located(place), located(other)) == is_so


def test_options_may_be_given_for_each_scheme() -> None:
    access = Access({"s3": {"key": "k"}, "sftp": {"port": 22}})
    assert access.options_of(BUCKET) == {"key": "k"}
    assert access.options_of(Remote("sftp", "h/x")) == {"port": 22}
    assert access.options_of(Remote("gs", "x")) == {}
    assert Access({"key": "k"}).options_of(BUCKET) == {"key": "k"}


def test_memory_of_parts_is_bounded_and_never_raised() -> None:
    assert Access().within(1 << 20).limits.memory == 1 << 20
    assert Access({}, Limits(memory=5)).within(1 << 20).limits.memory == 5
    access, place = Access(), Remote("sftp", "host/srv")
    assert access.store(place) is access.store(place)
    assert access.within(1 << 20).store(place) is not access.store(place)
