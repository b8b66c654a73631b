from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from ckptsync.catalogue import cached
from ckptsync.catalogue.cached import Cache, cache_path, read_catalogue
from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import put, two_nodes

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
    found.runs = {name: run for name, run in found.runs.items() if run.checkpoints}
    return found


def test_what_was_kept_is_what_is_loaded_and_only_its_owner_reads_it(cache: Cache) -> None:
    cache.save(URL)
    assert loaded() == cache
    assert cache_path(URL).stat().st_mode & 0o777 == 0o600
    assert cache_path(URL).parent.stat().st_mode & 0o777 == 0o700
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


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode({"checkpoints": {"checkpoint-1": {"key": 1}}}),
        b"\xa1\xff",
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1\xff\xa1a",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=len,
)
def test_a_run_of_another_shape_or_none_at_all_is_an_empty_cache(body: bytes) -> None:
    for place in (cached._Place(len(cached._HEAD), len(body), digest(body)), None):
        runs = {"run": place} if place else {}
        index = msgspec.msgpack.encode(cached._Content(URL, runs)) if place else body
        tail = digest(index).encode() + b"%016d" % len(index)
        cache_path(URL).parent.mkdir(exist_ok=True)
        cache_path(URL).write_bytes(cached._HEAD + body + index + tail)
        assert loaded() == Cache()


def test_of_one_run_only_that_run_is_decoded_and_the_others_stay_in_the_file(cache: Cache) -> None:
    store = MemoryStore()
    two_nodes(store)
    [manifest, *_] = read_state(store).readable[0].manifests
    put(store, replace(manifest.manifest, run="other"))
    every = Cache()
    read_catalogue(store, every)
    every.save(URL)
    one = Cache.load(URL)
    assert [s.run for s in read_catalogue(store, one, "run").summaries] == ["run"]
    assert one.runs.keys() == {"run"}
    one.is_new = True
    one.save(URL)
    assert loaded() == every


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
