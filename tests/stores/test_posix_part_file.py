"""Drafts: continued, compared, filled in any order."""

from __future__ import annotations

import mmap
import os
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import Exists, Incomplete, StoreError, Transient
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.oserrors import StoreErrors
from ckptsync.stores.posix.part_file import Draft, is_unfinished, part_of
from ckptsync.stores.posix.publish import replace
from ckptsync.stores.posix.store import PosixStore

CONTENT = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def begin(at: int, origin: str = "node/a/1", name: str = "a") -> Draft:
    return Draft(at, name, origin, StoreErrors("store"), give_name=replace)


def left(at: int, content: bytes) -> Path:
    """What a writer that was killed after ``content`` leaves."""
    draft = begin(at)
    draft.append(content)
    path = Path(f"/proc/self/fd/{at}").readlink() / draft.part
    draft.end(keep=True)
    return path


def finish(draft: Draft, *chunks: bytes) -> bytes:
    directory = Path(f"/proc/self/fd/{draft._at}").readlink()
    for chunk in chunks:
        draft.append(chunk)
    draft.commit()
    return (directory / draft.name).read_bytes()


def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of everything that is written from now on."""
    found: list[int] = []
    write = os.pwrite

    def counted(fd: int, data: memoryview, start: int) -> int:
        found.append(write(fd, data, start))
        return found[-1]

    monkeypatch.setattr(os, "pwrite", counted)
    return found


@pytest.mark.parametrize("count", [0, 1, 4096, 1_000_000, len(CONTENT) - 1, len(CONTENT)])
def test_only_what_is_missing_is_written(
    at: int, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    left(at, CONTENT[:count])
    draft = begin(at)
    assert draft.left == count
    written = writes(monkeypatch)
    assert (
        finish(draft, CONTENT[:70_000], CONTENT[70_000:2_500_000], CONTENT[2_500_000:]) == CONTENT
    )
    assert sum(written) == len(CONTENT) - count // 4096 * 4096


@pytest.mark.parametrize("odd", [0, 5000, 1_999_999])
def test_what_is_not_the_same_is_written_again(at: int, odd: int) -> None:
    """A power cut leaves zeros, or the source has changed."""
    other = bytearray(CONTENT[:2_000_000])
    other[odd] ^= 1
    left(at, bytes(other))
    assert finish(begin(at), CONTENT) == CONTENT


def test_what_is_longer_is_cut(at: int) -> None:
    left(at, CONTENT)
    assert finish(begin(at), CONTENT[:100_000]) == CONTENT[:100_000]
    left(at, CONTENT)
    assert finish(begin(at)) == b""


def test_nobody_else_continues_it(at: int, tmp_path: Path) -> None:
    path = left(at, b"x")
    for other in (begin(at, "node/a/2"), begin(at, name="b"), begin(at, "")):
        assert (other.left, other.part == path.name) == (0, False)
        other.end(keep=True)
    assert all(is_unfinished(p.name) for p in tmp_path.iterdir())


def test_a_draft_that_is_being_written_is_left_alone_until_it_has_its_name(at: int) -> None:
    later: list[Draft] = []

    def named(at: int, part: str, last: str, made: os.stat_result) -> None:
        later.append(begin(at))  # the file is closed, and not named yet
        replace(at, part, last, made)

    writing = Draft(at, "a", "node/a/1", StoreErrors("store"), give_name=named)
    other = begin(at)
    assert (other.part == writing.part, other.may_stay) == (False, False)
    writing.commit()
    assert later[0].part != writing.part
    for draft in (other, *later):
        draft.end(keep=False)


def test_a_draft_that_has_its_name_is_never_written_to(at: int, tmp_path: Path) -> None:
    os.link(left(at, CONTENT), tmp_path / "named")
    draft = begin(at)
    assert draft.left == 0
    assert finish(draft, b"other") == b"other"
    assert (tmp_path / "named").read_bytes() == CONTENT


def test_what_is_not_a_file_of_ours_is_not_continued(at: int, tmp_path: Path) -> None:
    path = left(at, b"x")
    path.unlink()
    os.mkfifo(path)
    draft = begin(at)
    assert draft.part != path.name
    assert finish(draft, CONTENT) == CONTENT


def test_removing_makes_room(at: int, tmp_path: Path) -> None:
    draft = begin(at)
    draft.end(keep=False)
    draft.end(keep=False)
    assert list(tmp_path.iterdir()) == []


def shared(store: PosixStore, there: bytes, content: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that were written for ``content`` where the file system has given the new file the
    bytes ``there``.
    """
    written: list[int] = []
    write = os.pwrite

    def counted(fd: int, data: memoryview, start: int) -> int:
        written.append(write(fd, data, start))
        return written[-1]

    def share(fd: int) -> None:
        os.pwrite(fd, there, 0)
        monkeypatch.setattr(os, "pwrite", counted)

    store.write("a", [content[:70_000], content[70_000:]], About(len(content), share=share))
    monkeypatch.undo()
    assert read_all(store, "a") == content
    return sum(written)


def test_what_is_shared_is_compared_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PosixStore(str(tmp_path))
    tail = len(CONTENT) % 4096
    assert shared(store, CONTENT, CONTENT, monkeypatch) == tail
    assert shared(store, CONTENT + b"what has come since", CONTENT, monkeypatch) == tail
    assert shared(store, CONTENT[:8192], CONTENT, monkeypatch) == len(CONTENT) - 8192
    assert shared(store, b"", CONTENT, monkeypatch) == len(CONTENT)
    assert shared(store, bytes(len(CONTENT)), CONTENT, monkeypatch) == len(CONTENT), "other bytes"


def test_a_share_that_fails_is_no_write(tmp_path: Path) -> None:
    def share(_: int) -> None:
        raise Incomplete("the source is gone")

    store = PosixStore(str(tmp_path))
    with pytest.raises(Incomplete, match="gone"):
        store.write("a", [CONTENT], About(len(CONTENT), share=share))
    assert list(tmp_path.iterdir()) == []


def test_who_finds_a_file_already_made_takes_its_dead_writers_second_name_away_and_nothing_else(
    tmp_path: Path,
) -> None:
    store, about = PosixStore(str(tmp_path)), About(len(CONTENT), "node/a/1")
    store.create("a", [CONTENT], about)
    second, unrelated = tmp_path / part_of("a", about.origin), tmp_path / part_of("a", "another")
    os.link(tmp_path / "a", second)
    unrelated.write_bytes(b"somebody's")
    with pytest.raises(Exists):
        store.create("a", [CONTENT], about)
    assert not second.exists()
    second.write_bytes(b"of another file")
    for origin in (about.origin, "another"):
        with pytest.raises(Exists):
            store.create("a", [CONTENT], About(len(CONTENT), origin))
    assert second.exists()
    assert unrelated.exists()
    assert read_all(store, "a") == CONTENT


PLACED = os.urandom((1 << 20) + 5000)
PLACES = [Path("/dev/shm"), Path("/var/tmp")]  # a tmpfs, and most often a disk


@pytest.fixture(params=PLACES, ids=["memory", "disk"])
def store(request: pytest.FixtureRequest) -> Iterator[PosixStore]:
    with tempfile.TemporaryDirectory(
        dir=request.param if request.param.is_dir() else None
    ) as place:
        yield PosixStore(place)


def view(data: bytes) -> memoryview:
    """In memory that begins where a disk wants it."""
    memory = memoryview(mmap.mmap(-1, max(1, len(data))))[: len(data)]
    memory[:] = data
    return memory


def hidden(store: PosixStore) -> list[str]:
    return [path.name for path in Path(store.root).iterdir() if path.name.startswith(".")]


def test_bytes_in_any_order_are_one_file_once_it_is_committed(store: PosixStore) -> None:
    draft = store.open_draft("a", len(PLACED))
    for start in (1 << 19, 0, 1 << 20):
        draft.write_at(start, view(PLACED[start : start + (1 << 19) if start < 1 << 20 else None]))
    assert list(store.names("")) == []
    draft.commit()
    assert read_all(store, "a") == PLACED
    assert not hidden(store)


def test_what_was_there_is_replaced_and_only_then(store: PosixStore) -> None:
    store.write("d/a", [b"old"])
    draft = store.open_draft("d/a", 3)
    draft.write_at(0, memoryview(b"new"))
    assert read_all(store, "d/a") == b"old"
    draft.commit()
    assert read_all(store, "d/a") == b"new"


def test_who_gives_up_leaves_nothing_but_what_a_next_try_can_use(store: PosixStore) -> None:
    for error, left in [
        (StoreError("gone"), 0),
        (Transient("busy"), 1),
        (StoreError("gone"), 0),
        (KeyboardInterrupt(), 1),
    ]:
        draft = store.open_draft("a", 10, "origin")
        draft.write_at(0, memoryview(b"01234"))
        draft.give_up(error)
        draft.give_up(error)
        assert len(hidden(store)) == left
    assert list(store.names("")) == []
    draft = store.open_draft("a", 10, "origin")
    assert draft.left == 10
    out = bytearray(10)
    draft.read_at(0, memoryview(out))
    assert out == b"01234" + bytes(5)
    draft.write_at(5, memoryview(b"56789"))
    draft.commit()
    assert read_all(store, "a") == b"0123456789"
    assert not hidden(store)


def test_what_another_try_left_beyond_the_end_is_cut_off(store: PosixStore) -> None:
    draft = store.open_draft("a", 10, "origin")
    draft.write_at(0, memoryview(b"0123456789"))
    draft.give_up(Transient("busy"))
    draft = store.open_draft("a", 4, "origin")
    assert draft.left == 4
    draft.commit()
    assert read_all(store, "a") == b"0123"


def test_a_file_that_cannot_be_so_large_is_named_and_not_begun(store: PosixStore) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StoreError, match="a: file too large"):
            store.open_draft("a", 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not hidden(store)
