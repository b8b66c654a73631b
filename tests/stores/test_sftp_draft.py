"""Uploads: resuming, taking over, publishing, lost answers, and small files of several threads."""

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
from ckptsync.stores.part_upload import PART, FilePart
from ckptsync.stores.sftp.draft import SftpTarget, find_leftovers, token
from ckptsync.stores.sftp.server_files import ServerFiles
from ckptsync.stores.sftp.store import SftpStore
from tests.support.rate_limits import Counted
from tests.support.sftp_stores import files_of, over_ssh, served

ABOUT = About(8, "node:/a:8:1")


def target(
    files: ServerFiles, about: About = ABOUT, name: str = "run/a", *, replaces: bool = False
) -> SftpTarget:
    return SftpTarget(files, name, about, replaces)


def part(number: int, start: int, data: bytes) -> FilePart:
    return FilePart(number, start, memoryview(data))


def unfinished(path: Path) -> list[str]:
    return [p.name for p in (path / "run").iterdir() if p.name.endswith(".part")]


def test_a_later_writer_goes_on_with_what_is_there_and_believes_none_of_it(tmp_path: Path) -> None:
    target(files_of(tmp_path)).begin().put(part(1, 0, b"good"))
    (old,) = unfinished(tmp_path)
    later = target(files_of(tmp_path)).begin()
    assert unfinished(tmp_path) != [old]
    assert later.is_there(part(1, 0, b"good"))
    assert not later.is_there(part(1, 0, b"bad!"))
    assert not later.is_there(part(2, 4, b"more"))
    later.put(part(2, 4, b"more"))
    later.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"goodmore"
    assert unfinished(tmp_path) == []


def test_a_hole_is_not_there_and_large_parts_are_compared_to_their_end(tmp_path: Path) -> None:
    data = bytes(range(1, 201)) * 20_000
    first = target(files_of(tmp_path)).begin()
    first.put(part(2, len(data), data[:-1] + b"\0"))
    later = target(files_of(tmp_path)).begin()
    assert not later.is_there(part(1, 0, data))
    assert not later.is_there(part(2, len(data), data))
    assert later.is_there(part(2, len(data), data[:-1] + b"\0"))


def test_the_writer_whose_file_was_taken_over_gives_up_and_harms_nothing(tmp_path: Path) -> None:
    first = target(files_of(tmp_path)).begin()
    first.put(part(1, 0, b"good"))
    second = target(files_of(tmp_path)).begin()
    with pytest.raises(Transient, match="run/a: another writer of the same file has taken over"):
        first.put(part(2, 4, b"more"))
    first.abandon()
    second.put(part(2, 4, b"more"))
    second.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"goodmore"
    with pytest.raises(Transient):
        first.commit(8)


def test_another_origin_or_none_continues_nothing(tmp_path: Path) -> None:
    target(files_of(tmp_path)).begin().put(part(1, 0, b"good"))
    for about in (About(8, "node:/a:8:2"), About(8)):
        assert not target(files_of(tmp_path), about).begin().is_there(part(1, 0, b"good"))
    assert len(unfinished(tmp_path)) == 3
    assert token("a", About(8)) != token("a", About(8))
    assert token("a", ABOUT) == token("a", ABOUT) != token("b", ABOUT)
    assert find_leftovers(files_of(tmp_path), "run/a", About(8)) == []


def test_what_is_longer_than_the_content_is_cut_and_what_is_shorter_refused(tmp_path: Path) -> None:
    upload = target(files_of(tmp_path)).begin()
    upload.put(part(1, 0, b"0123456789"))
    with pytest.raises(StoreError, match="has 10 bytes where 11 were written"):
        upload.commit(11)
    upload.commit(8)
    assert (tmp_path / "run/a").read_bytes() == b"01234567"


def test_further_leftovers_go_with_the_commit(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for n, data in enumerate([b"go", b"goodmo", b"g"]):
        (tmp_path / f"run/.ckptsync-{token('run/a', ABOUT)}-{n}.part").write_bytes(data)
    upload = target(files_of(tmp_path)).begin()
    assert upload.left.size == 6
    upload.put(part(1, 0, b"goodmore"))
    upload.commit(8)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["a"]


def test_a_lost_answer_to_taking_over_loses_nothing(tmp_path: Path) -> None:
    target(files_of(tmp_path)).begin().put(part(1, 0, b"good"))
    upload = target(files_of(tmp_path, f"lose=18={tmp_path / 'marker'}")).begin()
    assert upload.is_there(part(1, 0, b"good"))


@pytest.mark.parametrize("kind", [3, 4, 6, 7, 14, 17, 18, 200])
@pytest.mark.parametrize("way", ["write", "create"])
def test_any_answer_may_be_lost(tmp_path: Path, kind: int, way: str) -> None:
    store, root = None, tmp_path / "store"
    root.mkdir()
    store = served(root, f"lose={kind}={tmp_path / 'marker'}")
    getattr(store, way)("run/a", [b"small"])
    assert (root / "run/a").read_bytes() == b"small"
    assert [p.name for p in (root / "run").iterdir()] == ["a"]
    assert (tmp_path / "marker").exists() or (kind, way) in {(18, "write"), (7, "write")}


@pytest.mark.parametrize(("way", "rename"), [("write", "posix-rename"), ("create", "rename")])
@pytest.mark.parametrize("size", [5, 20 << 20])
def test_bytes_are_durable_before_the_name_and_names_before_it_is_acknowledged(
    tmp_path: Path, way: str, rename: str, size: int
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    store = served(root, f"log={tmp_path / 'log'}", "limits=100000")
    getattr(store, way)("run/deep/a", [bytes(size)], About(size, "here"))
    steps = [
        step
        for step in (tmp_path / "log").read_text().splitlines()
        if step not in ("write", "limits")
    ]
    assert steps.pop(1) == "fsync store"  # whether directories can be synced
    assert steps == [
        "mkdir run",
        "fsync store",
        "mkdir deep",
        "fsync run",
        "fsync part",
        rename,
        "fsync deep",
    ]


def test_a_source_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    def dying() -> Iterator[bytes]:
        yield bytes(40 << 20)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        over_ssh(tmp_path).write("run/a", dying(), About(50 << 20, "here"))
    assert unfinished(tmp_path) == []


def test_a_name_taken_meanwhile_is_told_and_nothing_left(tmp_path: Path) -> None:
    upload = target(files_of(tmp_path)).begin()
    upload.put(part(1, 0, b"goodmore"))
    (tmp_path / "run/a").write_bytes(b"first")
    with pytest.raises(Exists):
        upload.commit(8)
    target(files_of(tmp_path), replaces=True).put_whole(memoryview(b"repaired"))
    assert (tmp_path / "run/a").read_bytes() == b"repaired"


def test_what_is_recorded_to_be_durable_is_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading costs what sending does: a writer restarted sooner than it has read everything would
    never get on.
    """
    monkeypatch.setattr("ckptsync.stores.sftp.draft.RECORD_S", 0.0)
    content = random.Random(1).randbytes(5 * PART + 5)
    about, moved = About(len(content), "node:/a"), []

    def until(end: int) -> Iterator[bytes]:
        yield content[:end]
        if end < len(content):
            raise Transient("killed")

    # of each of the first two, what follows the last whole part is not sent
    for end in (3 * PART, 4 * PART, len(content)):
        pace = Counted()
        store = served(
            tmp_path, "limits=261120", limits=Limits(threads=1, pace=pace, patience=0, stall=30)
        )
        with contextlib.nullcontext() if end == len(content) else pytest.raises(Transient):
            store.create("run/a", until(end), about)
        moved.append(sum(pace.taken))
    assert moved[1] < PART + 6 * 65536
    # less than the whole, of five: what was recorded may be some parts behind
    assert moved[2] < 4.5 * PART
    assert (tmp_path / "run/a").read_bytes() == content
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["a"]


def test_a_writer_killed_while_it_takes_over_leaves_the_record_and_another_s_start_is_seen(
    tmp_path: Path,
) -> None:
    begins = f".ckptsync-{token('run/a', ABOUT)}-"
    (tmp_path / "run").mkdir()
    (tmp_path / f"run/{begins}0.part").write_bytes(b"goodmo")
    # of the second the file is gone: its writer was killed before it had it
    for record in ("0.4", "1.4"):
        (tmp_path / f"run/{begins}{record}.part").touch()
    upload = target(files_of(tmp_path)).begin()
    assert upload.left.durable == 4
    assert any(
        name.endswith(".4.part") and upload.part[4:-5] in name for name in unfinished(tmp_path)
    )
    assert not upload.is_there(part(1, 0, b"gold"))
    assert upload.is_there(part(1, 0, b"good"))
    upload.put(part(2, 4, b"more"))
    upload.commit(8)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["a"]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("faults", [(), ("plain",), ("replaces",), ("lose",)])
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
    with pytest.raises(Exists, match="a: already there"):
        target(files_of(tmp_path, fault), name="a").publish("part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_replacing_is_atomic_or_refused(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"xyz")
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(
        StoreError,
        match=r"a: cannot be replaced, since the server has no posix-rename@openssh\.com",
    ):
        target(files_of(tmp_path, "plain"), name="a", replaces=True).publish("part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"
    target(files_of(tmp_path, f"lose=200={tmp_path / 'marker'}"), name="a", replaces=True).publish(
        "part", 3
    )
    assert (tmp_path / "a").read_bytes() == b"xyz"


@pytest.mark.parametrize("replaces", [False, True])
def test_what_another_writer_has_taken_over_is_not_committed(
    tmp_path: Path, *, replaces: bool
) -> None:
    with pytest.raises(Transient, match="taken over"):
        target(files_of(tmp_path), name="a", replaces=replaces).publish("part", 3)
    (tmp_path / "a").write_bytes(b"xyz")
    with pytest.raises((Transient, Exists)):
        target(files_of(tmp_path), name="a", replaces=replaces).publish("part", 3)


FILES = {f"run/d{n % 3}/f{n}": bytes([n]) * (n * 777) for n in range(40)}


def created(store: SftpStore) -> list[BaseException | None]:
    """What came of creating all of them at once."""
    with ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(store.create, name, [data], About(len(data)))
            for name, data in FILES.items()
        ]
    return [future.exception() for future in futures]


def contents(path: Path) -> dict[str, bytes]:
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != "marker"
    }


@pytest.mark.parametrize(
    "faults", [(), ("plain",), ("reorder",), ("unsynced",), ("replaces",), ("limits=1",)]
)
def test_many_are_there_whole_whatever_the_server_is_like(
    tmp_path: Path, faults: tuple[str, ...]
) -> None:
    store = served(tmp_path, *faults)
    assert {*created(store)} == {None}
    assert contents(tmp_path) == FILES
    assert {type(e) for e in created(store)} == {Exists}
    assert contents(tmp_path) == FILES


def test_many_are_there_whole_over_ssh(tmp_path: Path) -> None:
    assert {*created(over_ssh(tmp_path))} == {None}
    assert contents(tmp_path) == FILES


@pytest.mark.parametrize("fault", ["", "replaces"])
def test_of_many_with_one_name_one_is_created(tmp_path: Path, fault: str) -> None:
    stores = [served(tmp_path, *filter(None, [fault])) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(stores[n % 2].create, "b", [bytes([n])], About(1)) for n in range(8)]
    found = [type(f.exception()) for f in futures]
    if not fault:  # where a rename replaces, `create` can only look first
        assert sorted(t.__name__ for t in found) == ["Exists"] * 7 + ["NoneType"]
    assert {*found} <= {Exists, type(None)}
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
