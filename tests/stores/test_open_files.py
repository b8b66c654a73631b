"""Places that an operator names, here and elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.stores import open_files, opening
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.tensors import read_whole
from tests.support.remote_stores import reaching

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


def test_a_path_is_a_directory_and_a_url_what_its_store_lists(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    store = bucket("b")
    assert isinstance(open_files.tree(tmp_path, Access()), DirectoryFiles)
    assert open_files.tree(BUCKET, reaching({BUCKET: store})).sizes() == {"b": 1}


def test_around_a_place_only_what_is_asked_for_is_looked_at() -> None:
    access = reaching(
        {BUCKET: bucket("runs/a/config.json", "runs/a/checkpoint-5/tokenizer.json", "runs/a/other")}
    )
    found = open_files.around(RUN, access, ["config.json", "tokenizer.json"])
    assert found.sizes() == {"config.json": 18}
    assert read_whole(found, "config.json") == b"runs/a/config.json"


def test_who_may_not_look_around_finds_nothing_there_and_a_network_that_fails_is_said() -> None:
    for error in (StoreError("access denied"), NotFound("no such key")):
        access = reaching({BUCKET: Guarded(error)})
        assert open_files.around(RUN, access, ["config.json"]).sizes() == {}
        assert open_files.store_above(CHECKPOINT, access) is None
    with pytest.raises(Transient):
        open_files.around(RUN, reaching({BUCKET: Guarded(Transient("reset"))}), ["config.json"])


def test_the_store_that_a_place_is_in_is_found_at_any_height() -> None:
    for above in (BUCKET, Remote("s3", "bucket/runs"), RUN, CHECKPOINT):
        prefix = above.rest.removeprefix("bucket").lstrip("/")
        access = reaching({BUCKET: bucket(f"{prefix}/.ckptsync/store.json".lstrip("/"))})
        assert open_files.store_above(CHECKPOINT, access) == above


def test_the_bucket_that_threads_look_into_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of botocore's costs a quarter of a second."""
    opened: list[str] = []

    def counted(url: str, *_: object) -> Store:
        opened.append(threading.current_thread().name)
        return bucket()

    monkeypatch.setattr(opening, "bare", counted)
    assert open_files.store_above(CHECKPOINT, Access()) is None
    assert opened == [threading.current_thread().name], "by whoever asks, before there are threads"


def test_the_files_of_a_place_that_was_named_are_those_at_its_top() -> None:
    base = Remote("mem", "base")
    store = MemoryStore()
    for name in ("config.json", "model.safetensors", "below/config.json"):
        store.write(name, [b"x"])
    assert open_files.named(base, reaching({base: store})).sizes() == {
        "config.json": 1,
        "model.safetensors": 1,
    }
    with pytest.raises(ConfigError):
        open_files.named(base, reaching({base: MemoryStore()}))


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
    assert [other.url for other in open_files.parents(found)] == above


def test_a_place_may_be_inside_another() -> None:
    for place, other in [("s3://b/x", "s3://b/x"), ("s3://b/x/y", "s3://b/x"), ("/x/y", "/x")]:
        assert open_files.is_inside(located(place), located(other))
    for place, other in [
        ("s3://b/xy", "s3://b/x"),
        ("sftp://b/x/y", "s3://b/x"),
        ("/x/y", "s3://x"),
    ]:
        assert not open_files.is_inside(located(place), located(other))


def test_options_may_be_given_for_each_scheme() -> None:
    both = Access({"s3": {"key": "k"}, "sftp": {"port": 22}})
    assert (
        both.options_of(BUCKET),
        both.options_of(Remote("sftp", "h/x")),
        both.options_of(Remote("gs", "x")),
    ) == (
        {"key": "k"},
        {"port": 22},
        {},
    )
    assert Access({"key": "k"}).options_of(BUCKET) == {"key": "k"}


def test_memory_of_parts_is_bounded_and_never_raised() -> None:
    assert Access().within(1 << 20).limits.memory == 1 << 20
    assert Access({}, Limits(memory=5)).within(1 << 20).limits.memory == 5
