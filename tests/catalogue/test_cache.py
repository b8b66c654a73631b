from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from ckptsync.catalogue import cached
from ckptsync.catalogue.cached import Cache, cache_path, read_catalogue
from ckptsync.digest import digest
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import two_nodes

URL = "s3://bucket/store"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache() -> Cache:
    store, made = MemoryStore(), Cache()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    read_catalogue(store, made)
    return made


def loaded(url: str = URL) -> Cache:
    found = Cache.load(url)
    found.unpack()
    return found


def test_what_was_kept_is_what_is_loaded_and_only_its_owner_reads_it(cache: Cache) -> None:
    cache.save(URL)
    assert loaded() == cache
    assert cache_path(URL).stat().st_mode & 0o777 == 0o600
    assert loaded("s3://bucket/other") == Cache()


def test_nothing_is_written_where_nothing_is_new(cache: Cache) -> None:
    cache.save(URL)
    cache_path(URL).unlink()
    cache.save(URL)
    assert not cache_path(URL).exists()


@pytest.mark.parametrize("at", [0, 20, 60, 100, 1000, -1])
def test_a_flipped_bit_anywhere_is_an_empty_cache(cache: Cache, at: int) -> None:
    cache.save(URL)
    data = bytearray(cache_path(URL).read_bytes())
    data[at] ^= 1
    cache_path(URL).write_bytes(data)
    assert loaded() == Cache()


def test_a_piece_of_a_file_and_another_programs_are_empty_caches(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save(URL)
    data = cache_path(URL).read_bytes()
    for size in (0, 10, 70, 200, len(data) - 1):
        cache_path(URL).write_bytes(data[:size])
        assert loaded() == Cache()
    cache_path(URL).write_bytes(data)
    monkeypatch.setattr(cached, "_HEAD", b"ckptsync catalogue 99 00\n")
    assert loaded() == Cache()


def test_units_of_another_shape_are_an_empty_cache() -> None:
    body = msgspec.msgpack.encode(
        cached._Content(
            URL, {}, msgspec.Raw(msgspec.msgpack.encode([["run", "checkpoint-1", {"key": 1}]]))
        )
    )
    cache_path(URL).parent.mkdir()
    cache_path(URL).write_bytes(cached._HEAD + digest(body).encode() + body)
    assert loaded() == Cache()


@pytest.mark.parametrize(
    "units",
    [
        b"\xa1\xff",
        b"\x91" * 100_000 + b"\xc0",
        b"\x91\x93\xa1\xff\xa1a\x80",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_units_that_are_none_are_an_empty_cache(units: bytes) -> None:
    for body in (msgspec.msgpack.encode(cached._Content(URL, {}, msgspec.Raw(units))), units):
        cache_path(URL).parent.mkdir(exist_ok=True)
        cache_path(URL).write_bytes(cached._HEAD + digest(body).encode() + body)
        assert loaded() == Cache()


def test_a_home_that_cannot_be_written_costs_only_time(cache: Cache, home: Path) -> None:
    (home / "ckptsync").write_text("a file where the directory would be")
    cache.save(URL)
    assert loaded() == Cache()


def test_a_service_has_a_directory_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", f"{home}/one{os.pathsep}{home}/two")
    assert cache_path(URL).parent == home / "one"


def test_a_user_without_a_home_keeps_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_number: int) -> NoReturn:
        raise KeyError  # as the system says of a number that it does not know

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    cache.save(URL)
    assert loaded() == Cache()
