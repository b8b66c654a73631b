"""Storing on the trainer's own file system, where files may share their bytes: run by
`tests/stores/test_posix_faults.py`, where one is mounted.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete
from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.store import PosixStore
from ckptsync.walk import walk
from ckptsync.worker.local_save import LocalFile
from ckptsync.worker.upload_sources import UploadSource
from tests.support.store_contract import names

MOUNTED = os.environ.get("CKPTSYNC_TEST_MOUNTED", "")
CONTENT = random.Random(1).randbytes((32 << 20) + 5)


@pytest.fixture
def home() -> Iterator[Path]:
    disk = Path(MOUNTED, "home")
    (disk / "store").mkdir(parents=True)
    (disk / "output").mkdir()
    (disk / "output/x").write_bytes(CONTENT)
    os.sync()
    yield disk
    shutil.rmtree(disk)


def source(home: Path) -> UploadSource:
    return UploadSource(
        LocalFile(walk(home / "output").files[0], home / "output", is_pinned=False), "n0"
    )


def store_it(home: Path) -> PosixStore:
    store, content = PosixStore(str(home / "store")), source(home)
    store.create("run/x", content, content.about)
    return store


def used(home: Path) -> int:
    os.sync()
    info = os.statvfs(home)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def test_a_file_takes_up_no_room_of_its_own(home: Path) -> None:
    before = used(home)
    store = store_it(home)
    assert used(home) - before < len(CONTENT) / 4
    assert read_all(store, "run/x") == CONTENT


def test_what_the_trainer_writes_later_is_not_in_the_store(home: Path) -> None:
    store = store_it(home)
    with (home / "output/x").open("r+b") as file:
        file.write(b"changed in place")
    assert read_all(store, "run/x") == CONTENT


def test_a_source_that_changes_while_it_is_read_is_not_stored(home: Path) -> None:
    store, content = PosixStore(str(home / "store")), source(home)

    def changing() -> Iterator[memoryview]:
        for n, chunk in enumerate(content):
            if n == 2:
                with (home / "output/x").open("r+b") as file:
                    file.write(b"changed in place")
            yield chunk

    with pytest.raises(Incomplete, match="changed"):
        store.write("run/x", changing(), content.about)
    assert names(store) == []
    assert not [path for path in (home / "store").rglob("*") if path.is_file()]


def test_nothing_is_left_open_and_so_locked(home: Path) -> None:
    store_it(home)
    there = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in there if path.startswith(str(home)) and Path(path).is_file()]
