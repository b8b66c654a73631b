"""Bytes past the cache and through it: the same file, whatever the chunks are and wherever their
memory begins.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptsync.stores.posix import part_file
from ckptsync.stores.posix.part_file import BLOCK, WORTH, Draft, Filled
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
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def write(fd: int, chunks: list[memoryview]) -> None:
    output = Filled(Draft(-1, "", fd))
    for chunk in chunks:
        output.add(chunk)
    output.sync()
    wanted = b"".join(map(bytes, chunks))
    assert os.pread(fd, len(wanted) + 1, 0) == wanted


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("memory", [aligned, askew])
@pytest.mark.parametrize("is_on_disk", [lambda _: True, lambda _: False])
def test_the_file_is_the_chunks(
    fd: int,
    sizes: list[int],
    memory: Callable[[int], memoryview],
    is_on_disk: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_file, "is_on_disk", is_on_disk)
    write(fd, [memory(size) for size in sizes])


def test_what_was_written_is_let_go_of_and_stays(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "LET_GO", 1000)
    write(fd, [askew(700) for _ in range(9)])


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK])
def test_short_writes_and_a_refusal_in_the_midst_lose_and_double_nothing(
    fd: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take less than it was given, and refuse the rest: nothing of a chunk may then be
    written again.
    """
    real, calls = os.write, []

    def short(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            raise OSError(errno.EINVAL, "not aligned")
        return real(fd, data[:most])

    monkeypatch.setattr(os, "write", short)
    monkeypatch.setattr(part_file, "is_on_disk", lambda _: True)
    write(fd, [aligned(WORTH), aligned(2 * WORTH), aligned(5)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_is_told(fd: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, "x")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="x") as raised:
        write(fd, [aligned(WORTH)])
    assert raised.value.errno == code


def test_flags_are_as_they_were(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "is_on_disk", lambda _: True)
    write(fd, [aligned(WORTH)])
    assert os.pwrite(fd, b"through the cache", 1)


@pytest.mark.parametrize("size", [0, 1, BLOCK + 1, WORTH])
def test_room_for_a_chunk_is_as_large_as_asked_and_begins_with_a_block(size: int) -> None:
    room = chunk_room(size)
    assert len(room) == size
    assert not size or np.frombuffer(room, "u1").ctypes.data % BLOCK == 0
