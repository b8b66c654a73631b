"""Bytes past the cache and through it: the same file, whatever the chunks are and wherever their
memory begins.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptsync.stores.oserrors import StoreErrors
from ckptsync.stores.posix import part_file
from ckptsync.stores.posix.part_file import BLOCK, WORTH, Draft
from ckptsync.stores.posix.publish import replace
from ckptsync.stores.stream import chunk_room

SIZES = [
    [0], [1], [BLOCK], [WORTH], [WORTH + 1], [WORTH, WORTH], [3, WORTH], [WORTH, 3, WORTH], [WORTH,
    WORTH - BLOCK, 2 * WORTH + 5, 7],
    [WORTH + BLOCK, 0, WORTH, 1],
]  # fmt: skip


def aligned(size: int) -> memoryview:
    held = np.random.default_rng(size).integers(0, 256, size + BLOCK, "u1")
    at = -held.ctypes.data % BLOCK
    return held[at : at + size].data


def askew(size: int) -> memoryview:
    return aligned(size + 8)[5 : 5 + size]


@pytest.fixture
def at(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def write(at: int, chunks: list[memoryview]) -> None:
    draft = Draft(at, "out", "", StoreErrors("store"), give_name=replace)
    for chunk in chunks:
        draft.append(chunk)
    draft.commit()
    assert Path(f"/proc/self/fd/{at}/out").read_bytes() == b"".join(map(bytes, chunks))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("memory", [aligned, askew])
@pytest.mark.parametrize("is_on_disk", [lambda _: True, lambda _: False])
def test_the_file_is_the_chunks(
    at: int,
    sizes: list[int],
    memory: Callable[[int], memoryview],
    is_on_disk: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_file, "is_on_disk", is_on_disk)
    write(at, [memory(size) for size in sizes])


def test_what_was_written_is_let_go_of_and_stays(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "LET_GO", 1000)
    write(at, [askew(700) for _ in range(9)])


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK])
def test_short_writes_and_a_refusal_in_the_midst_lose_and_double_nothing(
    at: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take less than it was given, and refuse the rest."""
    real, calls = os.pwrite, []

    def short(fd: int, data: memoryview, start: int) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            raise OSError(errno.EINVAL, "not aligned")
        return real(fd, data[:most], start)

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(part_file, "is_on_disk", lambda _: True)
    write(at, [aligned(WORTH), aligned(2 * WORTH), aligned(5)])


def test_large_chunks_go_past_the_cache_and_what_follows_them_through_it(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, []

    def noted(fd: int, data: memoryview, start: int) -> int:
        calls.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real(fd, data, start)

    try:
        os.close(os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, dir_fd=at))
    except OSError:
        pytest.skip("no file system that writes past the cache here")
    monkeypatch.setattr(os, "pwrite", noted)
    monkeypatch.setattr(part_file, "is_on_disk", lambda _: True)
    write(at, [aligned(WORTH), aligned(WORTH + 5), aligned(WORTH)])
    assert calls == [(True, WORTH), (True, WORTH), (False, 5), (False, WORTH)]


@pytest.mark.parametrize("size", [0, 1, BLOCK + 1, WORTH])
def test_room_for_a_chunk_is_as_large_as_asked_and_begins_with_a_block(size: int) -> None:
    room = chunk_room(size)
    assert len(room) == size
    assert not size or np.frombuffer(room, "u1").ctypes.data % BLOCK == 0
