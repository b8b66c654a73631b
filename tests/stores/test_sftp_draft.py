"""Uploads: resuming, the tail, publishing, lost answers, and small files of several threads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import Exists, StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.limits import Limits
from ckptsync.stores.part_upload import FilePart
from ckptsync.stores.sftp.draft import PART, SftpTarget, SftpUpload
from ckptsync.stores.sftp.server_files import ServerFiles
from tests.support.exhaustive import sampled
from tests.support.rate_limits import Counted
from tests.support.sftp_stores import files_of, served
from tests.support.waiting import until

ABOUT = About(8, "node:/a:8:1")


def target(
    files: ServerFiles, about: About = ABOUT, name: str = "run/a", *, replaces: bool = False
) -> SftpTarget:
    return SftpTarget(files, name, about, replaces)


def begun(
    path: Path, about: About = ABOUT, name: str = "run/a", *, replaces: bool = False
) -> SftpUpload:
    return target(files_of(path), about, name, replaces=replaces).begin()


def part(number: int, start: int, data: bytes) -> FilePart:
    return FilePart(number, start, memoryview(data))


def unfinished(path: Path) -> list[str]:
    return [p.name for p in (path / "run").iterdir() if p.name.endswith(".part")]


def test_a_later_writer_goes_on_with_what_is_there_and_believes_none_of_it(tmp_path: Path) -> None:
    begun(tmp_path).put(part(1, 0, b"good"))
    (left,) = unfinished(tmp_path)
    (tmp_path / "run" / left.replace("_", "_z")).touch()  # a shorter one
    later = begun(tmp_path)
    assert later.part == f"run/{left}"
    assert later.reuse_part(part(1, 0, b"good"))
    assert not later.reuse_part(part(1, 0, b"bad!"))
    assert not later.reuse_part(part(2, 4, b"more"))
    later.put(part(2, 4, b"more"))
    later.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"goodmore"
    assert len(unfinished(tmp_path)) == 1, "the shorter one"


def test_a_hole_is_not_there_and_large_parts_are_compared_to_their_end(tmp_path: Path) -> None:
    data = bytes(range(1, 201)) * 20_000
    about = About(2 * len(data), "node:/a")
    first = begun(tmp_path, about)
    first.put(part(2, len(data), data[:-1] + b"\0"))
    later = begun(tmp_path, about)
    assert not later.reuse_part(part(1, 0, data))
    assert not later.reuse_part(part(2, len(data), data))
    assert later.reuse_part(part(2, len(data), data[:-1] + b"\0"))


@pytest.mark.parametrize(("faults", "is_reused"), [((), True), (("plain",), False)])
def test_a_part_before_the_tail_is_compared_to_its_end_where_nothing_is_synced(
    tmp_path: Path,
    faults: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_reused: bool,
) -> None:
    monkeypatch.setattr("ckptsync.stores.sftp.draft.TAIL", 1000)
    monkeypatch.setattr("ckptsync.stores.sftp.draft._TAIL_PARTS", 0)
    data = bytes(100_000)
    aim = target(files_of(tmp_path, *faults), About(2 * len(data), "node:/a"))
    (tmp_path / aim.begin().part).write_bytes(data[:-1] + b"!" + data)
    assert aim.begin().reuse_part(part(1, 0, data)) is is_reused


def test_of_two_writers_of_one_origin_one_publishes_and_the_other_gives_up(tmp_path: Path) -> None:
    first, second = begun(tmp_path), begun(tmp_path)
    first.put(part(1, 0, b"good"))
    second.put(part(1, 0, b"good"))
    second.put(part(2, 4, b"more"))
    second.commit(8)
    with pytest.raises(Transient, match="run/a: another writer of the same file has published"):
        first.put(part(2, 4, b"more"))
    with pytest.raises(Transient):
        first.commit(8)
    first.abandon()
    assert (tmp_path / "run/a").read_bytes() == b"goodmore"
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("replaces", [False, True])
def test_a_writer_that_was_overtaken_twice_publishes_no_file_with_holes(
    tmp_path: Path, *, replaces: bool
) -> None:
    """The third one's file is as long as the first one's, and lacks other parts."""
    first = begun(tmp_path, replaces=replaces)
    first.put(part(1, 0, b"good"))
    begun(tmp_path).abandon()
    third = begun(tmp_path, replaces=replaces)
    third.put(part(2, 4, b"more"))  # and is killed
    with pytest.raises(Transient, match="published or removed"):
        first.put(part(2, 4, b"more"))
    with pytest.raises(Transient):
        first.commit(8)
    assert not (tmp_path / "run/a").exists()
    assert (tmp_path / third.part).read_bytes() == b"\0\0\0\0more"


def test_another_origin_or_none_continues_nothing(tmp_path: Path) -> None:
    begun(tmp_path).put(part(1, 0, b"good"))
    for about in (About(8, "node:/a:8:2"), About(8)):
        assert not begun(tmp_path, about).reuse_part(part(1, 0, b"good"))
    assert not begun(tmp_path, name="run/b").reuse_part(part(1, 0, b"good"))
    assert len(unfinished(tmp_path)) == 4


def test_what_somebody_else_finished_first_leaves_nothing_behind(tmp_path: Path) -> None:
    about = About(PART + 1, "node:/a")
    begun(tmp_path, about).put(part(1, 0, b"half"))
    (tmp_path / "run/a").write_bytes(b"from another node")
    with pytest.raises(Exists):
        served(tmp_path).create("run/a", [b"x"], about)
    assert unfinished(tmp_path) == []


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"mine")
    left = tmp_path / begun(tmp_path).part
    left.unlink()
    left.symlink_to(tmp_path / "keys")
    begun(tmp_path).put(part(1, 0, b"good"))
    assert (tmp_path / "keys").read_bytes() == b"mine"


def test_what_is_longer_or_shorter_than_the_content_is_neither_published_nor_continued(
    tmp_path: Path,
) -> None:
    upload = begun(tmp_path)
    upload.put(part(1, 0, b"0123456789"))
    for size in (8, 11):
        with pytest.raises(StoreError, match=f"has 10 bytes where {size} were written"):
            upload.commit(size)
    later = begun(tmp_path)
    assert later.part != upload.part
    later.put(part(1, 0, b"01234567"))
    later.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"01234567"


@pytest.mark.parametrize("kind", [3, 4, 6, 7, 14, 17, 18, 200])
@pytest.mark.parametrize("way", ["write", "create"])
def test_any_answer_may_be_lost(tmp_path: Path, kind: int, way: str) -> None:
    root = tmp_path / "store"
    root.mkdir()
    log = tmp_path / "log"
    store = served(root, f"lose={kind}={tmp_path / 'marker'}", f"log={log}")
    getattr(store, way)("run/a", [b"small"])
    assert log.read_text().splitlines()[-1] == "fsync run", "the name is durable"
    assert (root / "run/a").read_bytes() == b"small"
    assert [p.name for p in (root / "run").iterdir()] == ["a"]
    assert (tmp_path / "marker").exists() or (kind, way) in {(18, "write"), (7, "write")}


def test_a_name_that_may_be_given_already_is_not_written_again(tmp_path: Path) -> None:
    """A server that ends between its link and its unlink: both names are one file's."""
    root, log = tmp_path / "store", tmp_path / "log"
    root.mkdir()
    store = served(root, "halfway", f"lose=18={tmp_path / 'marker'}", f"log={log}")
    with pytest.raises(Exists):
        store.create("run/a", [b"small"])
    assert log.read_text().splitlines().count("write") == 1
    assert (root / "run/a").read_bytes() == b"small"
    assert [p.name for p in (root / "run").iterdir()] == ["a"]


@pytest.mark.parametrize(("way", "rename"), [("write", "posix-rename"), ("create", "rename")])
@pytest.mark.parametrize("size", [5, 20 << 20])
def test_bytes_are_durable_before_the_name_and_names_before_it_is_acknowledged(
    tmp_path: Path, way: str, rename: str, size: int
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    store = served(root, f"log={tmp_path / 'log'}", "limits=100000")
    getattr(store, way)("run/deep/a", [bytes(size)], About(size, "here"))
    lines = (tmp_path / "log").read_text().splitlines()
    steps = [line for line in lines if line not in ("write", "limits")]
    store.delete("run/deep/a")
    assert (tmp_path / "log").read_text().splitlines()[-2:] == ["remove a", "fsync deep"]
    assert list(root.iterdir()) == [], "trainers take an empty directory for a checkpoint"
    assert steps.pop(1) == "fsync store"  # whether directories can be synced
    assert steps[:4] == ["mkdir run", "fsync store", "mkdir deep", "fsync run"]
    assert steps[4:] == ["fsync part", rename, "fsync deep"]


SHORT_TAIL = 2  # parts


@pytest.fixture
def _short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptsync.stores.sftp.draft.TAIL", 0)
    monkeypatch.setattr("ckptsync.stores.sftp.draft._TAIL_PARTS", SHORT_TAIL)


def created_until(path: Path, content: bytes, end: int, *faults: str) -> int:
    """Create run/a, and be killed once all parts but the last of its first bytes are there.

    Return how many bytes were sent and read back.
    """
    about, pace = About(len(content), "node:/a"), Counted()
    limits = Limits(threads=1, pace=pace, patience=0, stall=30)
    store = served(path, "limits=261120", *faults, limits=limits)

    def length() -> int:
        return sum(p.stat().st_size for p in (path / "run").glob(".ckptsync-*"))

    def chunks() -> Iterator[bytes]:
        yield content[:end]
        if end < len(content):
            assert until(lambda: length() >= end - PART, 60)
            raise Transient("killed")

    whole = contextlib.nullcontext() if end == len(content) else pytest.raises(Transient)
    with whole:
        store.create("run/a", chunks(), about)
    return sum(pace.taken)


@pytest.mark.usefixtures("_short_tail")
def test_what_lies_before_the_tail_is_not_read_back(tmp_path: Path) -> None:
    """Reading costs what sending does: a writer restarted sooner than it has read everything would
    never get on.
    """
    content = random.Random(1).randbytes(8 * PART + 5)
    assert created_until(tmp_path, content, 6 * PART) == 5 * PART
    # a part that is new, the tail, and the beginnings of others
    assert created_until(tmp_path, content, 7 * PART) <= (1 + SHORT_TAIL) * PART + 6 * 65536
    assert created_until(tmp_path, content, len(content)) <= (2 + SHORT_TAIL) * PART + 7 * 65536
    assert (tmp_path / "run/a").read_bytes() == content
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["a"]


@pytest.mark.usefixtures("_short_tail")
@pytest.mark.parametrize("seed", sampled(range(3), 3, 1))
def test_whatever_a_power_cut_left_of_the_tail_the_file_is_whole(tmp_path: Path, seed: int) -> None:
    """Zeros where blocks had not reached the disk, and a file that is shorter than it was."""
    dice = random.Random(seed)
    content = dice.randbytes(6 * PART + 5)
    created_until(tmp_path, content, 5 * PART)
    (left,) = (tmp_path / "run").iterdir()
    size = left.stat().st_size
    durable = size - SHORT_TAIL * PART
    assert durable > 0
    with left.open("r+b") as file:
        for _ in range(5):
            at = dice.randrange(durable, size)
            file.seek(at)
            file.write(bytes(min(dice.choice([1, 4096, PART]), size - at)))
        if dice.random() < 0.5:
            file.truncate(dice.randrange(durable, size))
    created_until(tmp_path, content, len(content))
    assert (tmp_path / "run/a").read_bytes() == content


def test_no_byte_is_written_far_beyond_what_is_on_the_disk(tmp_path: Path) -> None:
    first = begun(tmp_path)
    upload = SftpUpload(first.target, first.part, 0, 0, tail=8)
    with ThreadPoolExecutor(1) as pool:
        upload.put(part(1, 0, b"1111"))
        upload.put(part(3, 8, b"3333"))
        far = pool.submit(upload.put, part(4, 12, b"4444"))
        with pytest.raises(TimeoutError):
            far.result(0.2)
        assert (tmp_path / first.part).stat().st_size == 12
        upload.put(part(2, 4, b"2222"))
        far.result(30)
    upload.commit(16)
    assert (tmp_path / "run/a").read_bytes() == b"1111222233334444"


def test_the_tail_begins_anew_at_a_part_that_the_disk_had_lost(tmp_path: Path) -> None:
    first = begun(tmp_path)
    upload = SftpUpload(first.target, first.part, 8, durable=8, tail=8)
    with ThreadPoolExecutor(1) as pool:
        upload.put(part(1, 0, b"1111"))
        far = pool.submit(upload.put, part(4, 12, b"4444"))
        with pytest.raises(TimeoutError):
            far.result(0.2)
        upload.put(part(2, 4, b"2222"))
        far.result(30)


def test_who_waits_for_the_disk_does_not_wait_for_a_part_that_failed(tmp_path: Path) -> None:
    first = begun(tmp_path)
    upload = SftpUpload(first.target, first.part, 0, 0, tail=8)
    with ThreadPoolExecutor(1) as pool:
        far = pool.submit(upload.put, part(4, 12, b"4444"))
        (tmp_path / first.part).unlink()
        with pytest.raises(Transient):
            upload.put(part(1, 0, b"1111"))
        far.result(30)
    assert not (tmp_path / first.part).exists()


def test_a_part_of_a_file_of_unknown_size_waits_for_no_disk_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such parts grow, and one may be larger than the tail."""
    monkeypatch.setattr("ckptsync.stores.sftp.draft.TAIL", 0)
    monkeypatch.setattr("ckptsync.stores.sftp.draft._TAIL_PARTS", 0)
    upload = begun(tmp_path, About(None, "node:/a"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(upload.put, part(1, 0, b"goodmore")).result(60)
    upload.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"goodmore"


@pytest.mark.usefixtures("_short_tail")
def test_the_disk_is_waited_for_while_later_parts_are_sent(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    root.mkdir()
    created_until(root, bytes(6 * PART), 6 * PART, f"log={log}")
    steps = log.read_text().splitlines()
    assert steps.count("fsync part") == 6 + 1
    assert steps[-2:] == ["rename", "fsync run"]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("faults", [(), ("plain",), ("replaces",), ("unsynced",), ("lose",)])
def test_a_name_that_is_free_is_given(
    tmp_path: Path, faults: tuple[str, ...], *, replaces: bool
) -> None:
    if faults == ("lose",):
        faults = (f"lose={200 if replaces else 18}={tmp_path / 'marker'}",)
    (tmp_path / "part").write_bytes(b"xyz")
    target(files_of(tmp_path, *faults), name="a", replaces=replaces).publish("part", 3)
    assert (tmp_path / "a").read_bytes() == b"xyz"
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("fault", ["plain", "replaces", "unsynced"])
def test_a_name_that_is_taken_is_never_claimed(tmp_path: Path, fault: str) -> None:
    (tmp_path / "part").write_bytes(b"xyz")
    (tmp_path / "a").write_bytes(b"old")
    log = tmp_path / "log"
    with pytest.raises(Exists, match="a: already there"):
        target(files_of(tmp_path, fault, f"log={log}"), name="a").publish("part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"
    if fault == "replaces":
        assert log.read_text().splitlines()[-1] == f"fsync {tmp_path.name}", "its name is durable"


def test_replacing_is_atomic_or_refused(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"xyz")
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(
        StoreError,
        match=r"a: cannot be replaced, since the server has no posix-rename@openssh\.com",
    ):
        target(files_of(tmp_path, "plain"), name="a", replaces=True).publish("part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"
