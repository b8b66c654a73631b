"""Drafts: continued, compared, filled in any order, written past the page cache, and published."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.errors import Exists, Incomplete, StoreError, Transient
from ckptsync.stores.contract import About, read_all
from ckptsync.stores.oserrors import StoreErrors
from ckptsync.stores.posix import draft, publish
from ckptsync.stores.posix.draft import BLOCK, LEAST_DIRECT, Draft, is_unfinished, part_of
from ckptsync.stores.posix.publish import DurableDirectories, replace
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.stream import chunk_room

CONTENT = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(str(tmp_path))


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
    directory = Path(f"/proc/self/fd/{draft._directory_fd}").readlink()
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
    assert draft.initial_size == count
    written = writes(monkeypatch)
    chunks = (CONTENT[:70_000], CONTENT[70_000:2_500_000], CONTENT[2_500_000:])
    assert finish(draft, *chunks) == CONTENT
    assert sum(written) == len(CONTENT) - count // 4096 * 4096


def test_what_is_not_the_same_or_longer_is_written_again(at: int) -> None:
    """A power cut leaves zeros, or the source has changed."""
    for odd in (0, 5000, 1_999_999):
        other = bytearray(CONTENT[:2_000_000])
        other[odd] ^= 1
        left(at, bytes(other))
        assert finish(begin(at), CONTENT) == CONTENT
    for content in (CONTENT[:100_000], b""):
        left(at, CONTENT)
        assert finish(begin(at), content) == content


def test_nobody_else_continues_it(at: int, tmp_path: Path) -> None:
    path = left(at, b"x")
    for other in (begin(at, "node/a/2"), begin(at, name="b"), begin(at, "")):
        assert (other.initial_size, other.part == path.name) == (0, False)
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
    for one in (other, *later):
        one.end(keep=False)


def test_a_draft_that_has_its_name_is_never_written_to(at: int, tmp_path: Path) -> None:
    os.link(left(at, CONTENT), tmp_path / "named")
    draft = begin(at)
    assert draft.initial_size == 0
    assert finish(draft, b"other") == b"other"
    assert (tmp_path / "named").read_bytes() == CONTENT


def test_a_draft_that_was_replaced_or_is_another_users_is_not_continued(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = left(at, CONTENT), fcntl.flock

    def overtaken(fd: int, how: int) -> None:
        path.rename(tmp_path / "published")
        path.write_bytes(b"a later writer's")
        real(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", overtaken)
        drafts = [begin(at)]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    drafts.append(begin(at))
    for other in drafts:
        assert other.part != path.name
        other.end(keep=False)


TAIL = len(CONTENT) % BLOCK


@pytest.mark.parametrize(
    ("shared", "missing"),
    [
        (CONTENT, TAIL),
        (CONTENT + b"what has come since", TAIL),
        (CONTENT[:8192], len(CONTENT) - 8192),
        (b"", len(CONTENT)),
        (bytes(len(CONTENT)), len(CONTENT)),
    ],
    ids=["same", "longer", "shorter", "empty", "other bytes"],
)
def test_what_is_shared_is_compared_and_not_written(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, shared: bytes, missing: int
) -> None:
    written: list[list[int]] = []

    def share(fd: int) -> None:
        os.pwrite(fd, shared, 0)
        written.append(writes(monkeypatch))

    store.write("a", [CONTENT[:70_000], CONTENT[70_000:]], About(len(CONTENT), share=share))
    assert read_all(store, "a") == CONTENT
    assert sum(written[0]) == missing


def test_a_share_that_fails_is_no_write(store: PosixStore) -> None:
    def share(_: int) -> None:
        raise Incomplete("the source is gone")

    with pytest.raises(Incomplete, match="gone"):
        store.write("a", [CONTENT], About(len(CONTENT), share=share))
    assert hidden(store) == []


def test_who_finds_a_file_already_made_takes_its_dead_writers_second_name_away_and_nothing_else(
    store: PosixStore, tmp_path: Path
) -> None:
    about = About(len(CONTENT), "node/a/1")
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


def hidden(store: PosixStore) -> list[str]:
    return [path.name for path in Path(store.root).iterdir() if path.name.startswith(".")]


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
    assert draft.initial_size == 10
    out = bytearray(10)
    draft.read_at(0, memoryview(out))
    assert out == b"01234" + bytes(5)
    draft.write_at(5, memoryview(b"56789"))
    draft.commit()
    assert read_all(store, "a") == b"0123456789"
    assert not hidden(store)


def test_a_file_that_cannot_be_so_large_is_named_and_not_begun(store: PosixStore) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StoreError, match="a: file too large"):
            store.open_draft("a", 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not hidden(store)


def made(path: Path, content: bytes) -> os.stat_result:
    path.write_bytes(content)
    return path.stat()


@pytest.mark.parametrize(
    ("call", "code"), [("rename", errno.ENOENT), ("link", errno.EEXIST)], ids=["replace", "claim"]
)
def test_a_name_was_given_though_the_answer_was_lost(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    real = getattr(os, call)

    def lost(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise OSError(code, "sent again by the NFS client")

    part = made(tmp_path / "part", b"new")
    monkeypatch.setattr(os, call, lost)
    (publish.replace if call == "rename" else publish.claim)(at, "part", "a", part)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"new")]


def test_a_rename_of_what_is_gone_is_none(at: int, tmp_path: Path) -> None:
    part = made(tmp_path / "part", b"new")
    # else its number would be free for the next file, which no writer lets happen
    (tmp_path / "part").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError):
        publish.replace(at, "part", "a", part)
    made(tmp_path / "a", b"somebody else's")
    with pytest.raises(FileNotFoundError):
        publish.replace(at, "part", "a", part)


@pytest.mark.parametrize("code", [0, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_name_is_claimed_by_a_link_or_an_exclusive_rename_and_a_taken_one_is_durable(
    at: int, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(os, "link", refused)
    publish.claim(at, "part", "a", made(tmp_path / "part", b"x"))
    assert synced == []
    with pytest.raises(FileExistsError):
        publish.claim(at, "part", "a", made(tmp_path / "part", b"y"))
    assert synced == ["/"]
    assert (tmp_path / "a").read_bytes() == b"x"


def test_directories_that_cannot_be_synced_need_not_be(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [errno.EINVAL, errno.EIO]

    def refused(_: int) -> None:
        raise OSError(codes[0], os.strerror(codes.pop(0)))

    monkeypatch.setattr(os, "fsync", refused)
    publish.sync_directory(at)
    with pytest.raises(OSError, match="Input/output"):
        publish.sync_directory(at)


@pytest.fixture
def directories(tmp_path: Path) -> DurableDirectories:
    return DurableDirectories(str(tmp_path))


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories that fsync is called for."""
    found: list[str] = []

    def fsync(fd: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix(str(tmp_path)) or "/")

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def make(directories: DurableDirectories, *way: str) -> None:
    with directories.opened(way) as made:
        directories.make_durable(way, made)


def test_each_directory_on_the_way_is_durable_once(
    directories: DurableDirectories, synced: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()  # by a writer that may die before its fsync
    make(directories, "a", "b")
    make(directories, "a", "b")
    make(directories, "a", "c")
    make(directories)
    assert synced == ["/", "/a", "/a"]
    assert (tmp_path / "a/b").is_dir()


def test_a_directory_made_again_by_somebody_else_is_another_one(
    directories: DurableDirectories, synced: list[str], tmp_path: Path
) -> None:
    make(directories, "a", "b")
    for _ in range(3):
        (tmp_path / "a/b").rmdir()
        (tmp_path / "a").rmdir()
        (tmp_path / "a/b").mkdir(parents=True)
        synced.clear()
        make(directories, "a", "b")
        assert synced == ["/", "/a"]


LEAST = LEAST_DIRECT
SIZES = [
    [0], [1], [BLOCK], [LEAST], [LEAST + 1], [LEAST, LEAST], [3, LEAST], [LEAST, 3, LEAST],
    [LEAST, LEAST - BLOCK, 2 * LEAST + 5, 7], [LEAST + BLOCK, 0, LEAST, 1],
]  # fmt: skip


def aligned(size: int) -> memoryview:
    room = chunk_room(size)
    room[:] = random.Random(size).randbytes(size)
    return room


def askew(size: int) -> memoryview:
    return aligned(size + 8)[5 : 5 + size]


def write_whole(at: int, chunks: list[memoryview]) -> None:
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
    monkeypatch.setattr(draft, "is_on_disk", is_on_disk)
    monkeypatch.setattr(draft, "DROP_EVERY", LEAST)  # what was written leaves the page cache
    write_whole(at, [memory(size) for size in sizes])


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK])
def test_short_writes_and_a_refusal_in_the_midst_lose_and_double_nothing(
    at: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take less than it was given, and refuse the rest."""
    real, numbers = os.pwrite, itertools.count(1)

    def short(fd: int, data: memoryview, start: int) -> int:
        if next(numbers) == 3:
            raise OSError(errno.EINVAL, "not aligned")
        return real(fd, data[:most], start)

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(draft, "is_on_disk", lambda _: True)
    write_whole(at, [aligned(LEAST_DIRECT), aligned(2 * LEAST_DIRECT), aligned(5)])


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
    monkeypatch.setattr(draft, "is_on_disk", lambda _: True)
    write_whole(at, [aligned(LEAST_DIRECT), aligned(LEAST_DIRECT + 5), aligned(LEAST_DIRECT)])
    assert calls == [(True, LEAST_DIRECT), (True, LEAST_DIRECT), (False, 5), (False, LEAST_DIRECT)]
