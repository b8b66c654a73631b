"""The S3 store against SeaweedFS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.contract import About, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.progress_signs import sent_bytes
from ckptsync.stores.s3.store import S3Store
from ckptsync.stores.urls import Remote
from tests.support.scripted_s3 import Say, scripted
from tests.support.seaweedfs import weed
from tests.support.store_contract import StoreContract


@pytest.fixture
def place() -> Remote:
    return Remote("s3", f"{weed().bucket()}/a prefix/ünd mehr")


@pytest.fixture
def store(place: Remote) -> Store:
    return S3Store(place, weed().options())


@pytest.fixture
def again(place: Remote) -> Store:
    return S3Store(place, weed().options())


class TestS3(StoreContract):
    pass


@pytest.mark.parametrize(("memory", "part"), [(96, 16), (48, 12), (19, 8), (1, 8)])
def test_of_little_memory_parts_are_smaller(place: Remote, memory: int, part: int) -> None:
    assert S3Store(place, weed().options(), Limits(memory=memory << 20)).least == part << 20


def test_listings_of_many_pages_are_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sorted(f"{a}/{b}{c}" for a in "ab" for b in ("", "x/") for c in range(5))
    wanted += [f"run/checkpoint-{n}/a" for n in range(7)]
    for name in wanted:
        store.write(name, [b"x"])
    monkeypatch.setattr("ckptsync.stores.s3.store.PAGE", 3)
    for prefix in ("", "a/"):
        assert [e.name for e in store.names(prefix)] == [n for n in wanted if n.startswith(prefix)]
    assert store.dirs("run/") == [f"checkpoint-{n}" for n in range(7)]
    assert store.dirs("run/", "checkpoint-5") == ["checkpoint-5"]


def test_keys_that_no_file_could_have_and_those_of_others_are_no_names() -> None:
    keys = ["pre/dir/", "pre/a/../../b", "pre/ba\\ck", "pre//x", "elsewhere/y", "pre", "pre/good"]
    contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    prefixes = (f"<Prefix>pre/{name}/</Prefix>" for name in ("a", "..", "b%5Cc", "d e"))
    directories = "".join(f"<CommonPrefixes>{prefix}</CommonPrefixes>" for prefix in prefixes)
    pages = (f"<ListBucketResult>{page}</ListBucketResult>" for page in (contents, directories))
    with scripted(*(Say(200, page.encode()) for page in pages)) as script:
        store = script.store()
        assert [e.name for e in store.names("")] == ["good"]
        assert store.dirs("") == ["a", "b%5Cc", "d e"]


def test_a_key_that_is_too_long_for_s3_is_refused_by_name(store: Store) -> None:
    with pytest.raises(StoreError, match="at most 1024"):
        store.write("/".join(["n" * 200] * 6), [b"x"])


def test_bytes_that_wait_in_a_part_do_not_count_as_sent(store: Store) -> None:
    before, counts = sent_bytes(), []

    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            yield bytes(1 << 20)
            counts.append(sent_bytes() - before)

    store.write("run/a", chunks(), About(3 << 20))
    assert counts == [0, 0, 0]
    assert sent_bytes() - before == 3 << 20
